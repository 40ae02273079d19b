"""An engine's own weights replaced by a version's, under the requests that run there."""

from collections.abc import Sequence
from time import monotonic

from app.db.models import PolicyVersion
from app.engine.control_client import ControlClient
from app.engine.errors import WeightsRejected

ONE_TOKEN: Sequence[int] = (0,)
"""A prompt that every model takes."""


def swap_weights(engine: ControlClient, url: str, version: PolicyVersion) -> float:
    """Pause, reload, label, resume; requests that run go on under the new weights, on KV computed by them.

    The caller has closed the replica for new requests: vLLM answers those that come during a pause with 503. An engine
    that raises stays paused, since nobody knows what weights it has; the caller loads others, which resumes it.

    Returns:
        Milliseconds from the pause to the resume.

    Raises:
        WeightsRejected: the engine did not take them, lacks the endpoints, or does not say which weights sampled a
            token. EngineError: what else a call can end in.
    """
    began = monotonic()
    engine.pause(url)
    engine.reload_weights(url, version.path)
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
