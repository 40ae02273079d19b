"""OpenAI's reply bodies, whole and in chunks.

Shapes: https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming and .../completions/object.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.engine.client import NO_LOGPROB, Delta
from app.inference.interaction import RunningInteraction
from app.inference.render import ChatRenderer

Json = dict[str, Any]


class ReplyFormat(Protocol):
    """One endpoint's shapes."""

    def whole(self, run: RunningInteraction) -> Json:
        """The reply of a finished interaction."""
        ...

    def opening(self, run: RunningInteraction) -> Iterator[Json]:
        """Chunks before the first token's."""
        ...

    def chunk(self, run: RunningInteraction, delta: Delta) -> Json:
        """The chunk that carries `delta`, which `run` has taken in already."""
        ...

    def usage_chunk(self, run: RunningInteraction) -> Json:
        """The last chunk, for stream_options.include_usage."""
        ...


@dataclass(frozen=True)
class ChatFormat:
    logprobs: bool

    def whole(self, run: RunningInteraction) -> Json:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": run.text, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(run, run.token_ids, run.logprobs),
            "finish_reason": run.finish_reason,
        }
        return {**_head(run, "chat.completion"), "choices": [choice], "usage": _usage(run)}

    def opening(self, run: RunningInteraction) -> Iterator[Json]:
        yield self._chunk(run, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, run: RunningInteraction, delta: Delta) -> Json:
        logprobs = self._logprobs(run, delta.token_ids, delta.logprobs)
        return self._chunk(run, {"content": delta.text} if delta.text else {}, logprobs, delta.finish_reason)

    def usage_chunk(self, run: RunningInteraction) -> Json:
        return {**_head(run, "chat.completion.chunk"), "choices": [], "usage": _usage(run)}

    def _chunk(self, run: RunningInteraction, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**_head(run, "chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, run: RunningInteraction, ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        if not self.logprobs or len(ids) != len(logprobs):
            return None
        content = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = run.call.target.renderer.token_text(token_id)
            # a token that is half a character has no text of its own, hence no bytes that could be told
            encoded = None if "\ufffd" in text else list(text.encode())
            content.append({"token": text, "logprob": _json_logprob(logprob), "bytes": encoded, "top_logprobs": []})
        return {"content": content, "refusal": None}


@dataclass(frozen=True)
class CompletionFormat:
    logprobs: bool

    def whole(self, run: RunningInteraction) -> Json:
        choice = self._choice(run, run.text, run.token_ids, run.logprobs, 0, run.finish_reason)
        return {**_head(run, "text_completion"), "choices": [choice], "usage": _usage(run)}

    def opening(self, run: RunningInteraction) -> Iterator[Json]:
        return iter(())

    def chunk(self, run: RunningInteraction, delta: Delta) -> Json:
        before = len(run.text) - len(delta.text)
        choice = self._choice(run, delta.text, delta.token_ids, delta.logprobs, before, delta.finish_reason)
        return {**_head(run, "text_completion"), "choices": [choice]}

    def usage_chunk(self, run: RunningInteraction) -> Json:
        return {**_head(run, "text_completion"), "choices": [], "usage": _usage(run)}

    def _choice(
        self,
        run: RunningInteraction,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        offset: int,
        finish_reason: str | None,
    ) -> Json:
        shown = None
        if self.logprobs and len(ids) == len(logprobs):
            shown = _completion_logprobs(run.call.target.renderer, ids, logprobs, offset)
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason}


def _completion_logprobs(renderer: ChatRenderer, ids: Sequence[int], logprobs: Sequence[float], offset: int) -> Json:
    tokens = [renderer.token_text(token_id) for token_id in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    shown = [_json_logprob(logprob) for logprob in logprobs]
    return {"tokens": tokens, "token_logprobs": shown, "top_logprobs": None, "text_offset": offsets}


def _json_logprob(value: float) -> float:
    """JSON has no -inf and no NaN."""
    return value if math.isfinite(value) else NO_LOGPROB


def _head(run: RunningInteraction, kind: str) -> Json:
    return {
        "id": str(run.id),
        "object": kind,
        "created": run.created,
        "model": f"{run.call.target.policy.name}@{run.version}",
    }


def _usage(run: RunningInteraction) -> Json:
    prompt, completion = len(run.call.prompt_ids), len(run.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
