"""The one client of the engine protocol (docs/architecture.md, Contract 1): EngineClient for the gateway, async.

Source of the wire format: vLLM's OpenAI-compatible server (entrypoints/openai/completion, entrypoints/serve/lora).
Control's side, ControlClient, and the errors are offered from here too.
"""

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.engine.control_client import ControlClient, ServedModel
from app.engine.errors import (
    AdapterNotLoaded,
    AdapterRejected,
    EngineBroke,
    EngineError,
    EngineOverloaded,
    EngineUnreachable,
    InvalidForEngine,
    PromptTooLong,
    WeightsRejected,
)
from app.engine.wire import CONNECT_TIMEOUT_S, REUSE_WITHIN_S, raise_for_error, transport_errors

__all__ = [
    "AdapterNotLoaded",
    "AdapterRejected",
    "ControlClient",
    "Delta",
    "EngineBroke",
    "EngineClient",
    "EngineCompletion",
    "EngineError",
    "EngineOverloaded",
    "EngineUnreachable",
    "InvalidForEngine",
    "PromptTooLong",
    "Sampling",
    "ServedModel",
    "WeightSpan",
    "WeightsRejected",
]

NO_LOGPROB = -9999.0
"""What vLLM writes in JSON for -inf."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one completion. top_p 1 and top_k 0 or -1 leave the policy's distribution as it is."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probs are then at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """At most four; the text ends before the first that appears, the token ids keep what was sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's eos; the one sampled is the last of the token ids and not in the text."""

    def body(self, model: str | None, prompt_ids: Sequence[int], *, stream: bool) -> dict[str, Any]:
        """The JSON of /v1/completions. The model's own sampling defaults never apply: every field is sent.

        model: an adapter; None: the engine's own weights, and then which of them sampled a token is asked for.
        """
        whose = {"return_weight_versions": True} if model is None else {"model": model}
        return whose | {
            "prompt": list(prompt_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "stream": stream,
        }


@dataclass(frozen=True)
class WeightSpan:
    """So many tokens in a row were sampled by the weights with this label."""

    label: str
    count: int


@dataclass(frozen=True)
class Delta:
    """What a stream adds: token ids, their log-probs, and text, which may lag behind the tokens."""

    token_ids: list[int]
    logprobs: list[float]
    """One per token, or none at all if what the engine sent does not fit the tokens."""
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    weight_spans: tuple[WeightSpan, ...] | None = None
    """On the last one, of the whole completion, if the engine's own weights were asked and it says so."""


@dataclass(frozen=True)
class EngineCompletion:
    token_ids: list[int]
    """The sampled tokens, a sampled stop token included."""
    logprobs: list[float] | None
    """Natural logs at the sampling temperature; None if the engine sent none."""
    text: str
    finish_reason: str
    prompt_tokens: int
    stop_reason: int | str | None = field(default=None)


class EngineClient:
    """One per process; connections are pooled per replica. Raises the errors of app/engine/errors.py."""

    def __init__(self, timeout_s: float):
        """timeout_s: the longest silence of the engine, which without streaming is the whole generation."""
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=REUSE_WITHIN_S),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def complete(
        self, url: str, model: str | None, prompt_ids: Sequence[int], sampling: Sampling
    ) -> EngineCompletion:
        with transport_errors(url):
            response = await self._http.post(
                f"{url}/v1/completions", json=sampling.body(model, prompt_ids, stream=False)
            )
        raise_for_error(response)
        try:
            answer = response.json()
            choice = answer["choices"][0]
            logprobs = choice["logprobs"]
            return EngineCompletion(
                token_ids=choice["token_ids"],
                logprobs=logprobs["token_logprobs"] if logprobs else None,
                text=choice["text"],
                finish_reason=choice["finish_reason"],
                prompt_tokens=answer["usage"]["prompt_tokens"],
                stop_reason=choice["stop_reason"],
            )
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{url} sent an answer that is no completion: {error!r}") from error

    async def stream(
        self, url: str, model: str | None, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        """Yields deltas as they are sampled, the last with a finish reason. Closing it frees the engine's slot."""
        request = self._http.build_request(
            "POST", f"{url}/v1/completions", json=sampling.body(model, prompt_ids, stream=True)
        )
        with transport_errors(url):
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise_for_error(response)
                finished = False
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        delta = _delta(url, event)
                        if delta is not None:
                            finished = finished or delta.finish_reason is not None
                            yield delta
                if not finished:
                    raise EngineBroke(f"{url} ended the stream without a finish reason")
            finally:
                await response.aclose()


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The payloads of a server-sent event stream until [DONE].

    Split on blank lines alone: text may hold characters that httpx's line splitting takes for line ends.
    """
    buffer = b""
    chunks: AsyncIterator[bytes] = response.aiter_bytes()
    async for chunk in chunks:
        buffer += chunk
        while b"\n\n" in buffer:
            event, buffer = buffer.split(b"\n\n", 1)
            payload = event.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                async for _ in chunks:  # to the end of the body: only then can the connection be used again
                    pass
                return
            yield payload


def _delta(url: str, payload: bytes) -> Delta | None:
    """One streamed chunk; None for one without a choice (usage). Raises EngineError if the engine reports an error."""
    try:
        chunk = json.loads(payload)
        if "error" in chunk:
            raise EngineError(f"{url} failed while streaming: {chunk['error']['message']}")
        if not chunk["choices"]:
            return None
        choice = chunk["choices"][0]
        return Delta(
            token_ids=choice["token_ids"],
            logprobs=_logprobs(choice),
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            weight_spans=weight_spans(choice),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"{url} streamed something that is no completion chunk: {error!r}") from error


def weight_spans(choice: dict[str, Any]) -> tuple[WeightSpan, ...] | None:
    """Which weights sampled the choice's tokens (vLLM's weight_versions); None if it does not say."""
    spans = choice.get("weight_versions")
    if spans is None:
        return None
    return tuple(WeightSpan(str(span["version"]), int(span["end"]) - int(span["start"])) for span in spans)


def _logprobs(choice: dict[str, Any]) -> list[float]:
    """A choice's log-probs if each token has a number; otherwise none, since which are whose is not known."""
    values = (choice["logprobs"] or {}).get("token_logprobs") or []
    if len(values) != len(choice["token_ids"]) or not all(isinstance(value, int | float) for value in values):
        return []
    return [value if value > NO_LOGPROB else -math.inf for value in values]
