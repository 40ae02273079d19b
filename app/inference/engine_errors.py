"""What a failed engine call means to the caller of the gateway."""

from app.engine.errors import (
    AdapterNotLoaded,
    EngineError,
    EngineOverloaded,
    EngineUnreachable,
    InvalidForEngine,
    PromptTooLong,
)
from app.errors import ApiError, EngineFailed, InvalidRequest, NotFound, RateLimited, Unavailable


class RequestTimedOut(EngineFailed):
    status = 504


def gateway_error(error: EngineError, *, pinned: bool) -> ApiError:
    """The error to answer with; `pinned`: the request named a version."""
    match error:
        case EngineOverloaded():
            return RateLimited(
                "The engine's queue is full: try again in a second.",
                code="engine_overloaded",
                headers={"Retry-After": "1"},
            )
        case EngineUnreachable():
            return Unavailable(
                "No engine can be reached: try again in a few seconds. An operator sees why under /admin/replicas.",
                code="engine_unreachable",
                headers={"Retry-After": "2"},
            )
        case AdapterNotLoaded() if pinned:
            return NotFound(
                "This version is not loaded any more: use the policy's name alone for the live one.",
                code="version_not_loaded",
                param="model",
            )
        case AdapterNotLoaded():
            return Unavailable(
                "The engine is still loading this policy: try again in a few seconds.",
                code="policy_preparing",
                headers={"Retry-After": "2"},
            )
        case PromptTooLong():
            return InvalidRequest(
                f"The prompt is too long for the engine: shorten it. ({error.message})", code="context_length_exceeded"
            )
        case InvalidForEngine():
            return InvalidRequest(
                f"The engine refuses these parameters: change them as it says. ({error.message})",
                code="refused_by_engine",
            )
    return EngineFailed(f"The engine failed: try again. ({error.message})", code="engine_failed")
