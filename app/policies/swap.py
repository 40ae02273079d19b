"""An engine's own weights replaced by a version's, under the requests that run there."""

from collections.abc import Callable, Sequence

from app.db.models import PolicyVersion
from app.engine.control_client import ControlClient
from app.engine.errors import EngineError, EngineSlow, WeightsRejected
from app.policies.standstill import Standstill

ONE_TOKEN: Sequence[int] = (0,)
"""A prompt that every model takes."""


class TurnLost(Exception):
    """Another process has taken the replica over, since this one stood still for too long."""


def swap_weights(
    engine: ControlClient, url: str, version: PolicyVersion, is_ours: Callable[[], bool], standstill: Standstill
) -> None:
    """Pause, reload, label, resume; requests that run go on under the new weights, on KV computed by them.

    The caller has closed the replica for new requests: vLLM answers those that come during a pause with 503. An engine
    that raises may stay paused, since nobody knows what weights it has; the caller loads others, which resumes it. One
    that is still at work on an earlier reload answers the pause after it, so that no two are under way.

    Args:
        is_ours: whether it is still this process's turn on the replica. A label on another process's weights would be
            believed.
        standstill: is told when the engine stops and when it goes on.

    Raises:
        WeightsRejected: the engine did not take them, did not say so in time, or lacks the endpoints. EngineError: what
            else a call can end in. TurnLost: nothing more is to be done here.
    """
    engine.pause(url)
    standstill.begins()
    _check(is_ours, url)
    try:
        engine.reload_weights(url, version.path)
    except EngineSlow as error:  # no queue of requests delays a reload: it is not for being busy
        raise WeightsRejected(f"{url} has not ended its reload of {version.adapter_name}: {error.message}") from error
    _check(is_ours, url)
    _label(engine, url, version.adapter_name)
    engine.resume(url)
    standstill.ends()


def check_label(engine: ControlClient, url: str, version: PolicyVersion) -> None:
    """One token must be said to be this version's. It waits in the engine's queue as any request.

    Raises:
        WeightsRejected: the engine does not say which weights sampled a token, or names others. EngineError: what else
            a completion can end in.
    """
    told = engine.sampled_by(url, ONE_TOKEN)
    if told != version.adapter_name:
        raise WeightsRejected(
            f"{url} says that {told or 'weights without a label'} sampled a token, not {version.adapter_name}: which "
            "version sampled what would be unknown. vLLM tells it from 0.33 on"
        )


def _label(engine: ControlClient, url: str, name: str) -> None:
    """An engine that takes no label any more can go on under the weights whose label it has: the old ones."""
    try:
        engine.label_weights(url, name)
    except EngineError:
        if engine.weight_label(url) != name:
            raise


def _check(is_ours: Callable[[], bool], url: str) -> None:
    if not is_ours():
        raise TurnLost(f"another control process works on {url} now")
