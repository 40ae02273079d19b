"""An engine's own weights replaced by a version's, under the requests that run there."""

from collections.abc import Callable, Sequence
from time import monotonic

from app.db.models import PolicyVersion
from app.engine.control_client import ControlClient
from app.engine.errors import WeightsRejected

ONE_TOKEN: Sequence[int] = (0,)
"""A prompt that every model takes."""


class TurnLost(Exception):
    """Another process has taken the replica over, since this one stood still for too long."""


def swap_weights(engine: ControlClient, url: str, version: PolicyVersion, is_ours: Callable[[], bool]) -> float:
    """Pause, reload, label, resume; requests that run go on under the new weights, on KV computed by them.

    The caller has closed the replica for new requests: vLLM answers those that come during a pause with 503. An engine
    that raises stays paused, since nobody knows what weights it has; the caller loads others, which resumes it.

    Args:
        is_ours: whether it is still this process's turn on the replica. A label on another process's weights would be
            believed.

    Returns:
        Milliseconds from the pause to the resume.

    Raises:
        WeightsRejected: the engine did not take them, lacks the endpoints, or does not say which weights sampled a
            token. EngineError: what else a call can end in. TurnLost: nothing more is to be done here.
    """
    began = monotonic()
    engine.pause(url)
    _check(is_ours, url)
    engine.reload_weights(url, version.path)
    _check(is_ours, url)
    engine.label_weights(url, version.adapter_name)
    engine.resume(url)
    paused_ms = 1e3 * (monotonic() - began)
    told = engine.sampled_by(url, ONE_TOKEN)
    if told != version.adapter_name:
        raise WeightsRejected(
            f"{url} says that {told or 'weights without a label'} sampled a token, not {version.adapter_name}: which "
            "version sampled what would be unknown. vLLM tells it from 0.33 on"
        )
    return paused_ms


def _check(is_ours: Callable[[], bool], url: str) -> None:
    if not is_ours():
        raise TurnLost(f"another control process works on {url} now")
