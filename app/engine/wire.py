"""What both clients of the engine protocol share: httpx's errors and vLLM's error bodies turned into ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from app.engine.errors import (
    AdapterNotLoaded,
    EngineBroke,
    EngineError,
    EngineOverloaded,
    EngineSlow,
    EngineUnreachable,
    InvalidForEngine,
    PromptTooLong,
)

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 75
"""How long our servers keep an idle connection: longer than clients do (httpx 5 s). With equal times a request can meet
the close, and fail without having been read."""
REUSE_WITHIN_S = 3.0
"""How long our clients keep one: shorter than the engines do (vLLM 5 s), for the same reason."""
_NO_TOKEN_LEFT = "max_tokens must be at least 1, got 0"


@contextmanager
def transport_errors(url: str) -> Iterator[None]:
    """Turns httpx's errors into ours: unreachable before a connection stands, slow or broken afterwards."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineUnreachable(f"cannot connect to the engine at {url}: {error}") from error
    except httpx.TimeoutException as error:
        raise EngineSlow(f"the engine at {url} did not answer in time: {error!r}") from error
    except httpx.HTTPError as error:
        raise EngineBroke(f"the connection to the engine at {url} broke: {error!r}") from error


def raise_for_error(response: httpx.Response) -> None:
    """Raises the error that a non-200 response stands for (vLLM's error body)."""
    status = response.status_code
    if status == httpx.codes.OK:
        return
    message, parameter = error_of(response)
    if status == httpx.codes.NOT_FOUND and "does not exist" in message:
        raise AdapterNotLoaded(message)
    if status == httpx.codes.SERVICE_UNAVAILABLE:
        raise EngineOverloaded(message)
    if status == httpx.codes.BAD_REQUEST:
        # a prompt of exactly the context's length leaves 0 tokens, which vLLM reports as a bad max_tokens
        if parameter == "input_tokens" or "maximum context length" in message or message.startswith(_NO_TOKEN_LEFT):
            raise PromptTooLong(message)
        raise InvalidForEngine(message)
    raise EngineError(f"the engine answered {status}: {message}")


def error_of(response: httpx.Response) -> tuple[str, str | None]:
    """(message, param) of vLLM's error body; the raw text if it is none."""
    try:
        error = response.json()["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return response.text[:500], None
