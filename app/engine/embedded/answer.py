"""A request's outputs written as vLLM's choices: one for the whole answer, or one per delta."""

from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer

from app.engine.embedded.protocol import CompletionRequest, json_logprob
from app.engine.embedded.sequence import Output, SampledToken, Sequence


class AnswerWriter:
    """Remembers how far the text offsets of the tokens have come."""

    def __init__(self, request: CompletionRequest, sequence: Sequence, tokenizer: Tokenizer):
        self._request = request
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._offset = 0
        self._first = True

    def choice(self, outputs: list[Output]) -> dict[str, Any]:
        """The choice for consecutive outputs; prompt ids ride on the first, the weights' labels on the last."""
        last = outputs[-1]
        tokens = [output.token for output in outputs if output.token is not None]
        ids = bool(self._request.return_token_ids)
        choice = {
            "index": 0,
            "text": "".join(output.text for output in outputs),
            "logprobs": None if self._request.logprobs is None else self._logprobs(tokens),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "prompt_token_ids": self._sequence.prompt_ids if ids and self._first else None,
            "token_ids": [token.id for token in tokens] if ids else None,
        }
        self._first = False
        if self._request.return_weight_versions and last.finish_reason is not None:
            choice["weight_versions"] = [asdict(span) for span in self._sequence.weight_spans]
        return choice

    def _logprobs(self, tokens: list[SampledToken]) -> dict[str, Any]:
        """Parallel lists; the sampled token comes first among the top ones, which it may not belong to."""
        texts = [self._text(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top = []
        for text, token in zip(texts, tokens, strict=True):
            entry = {text: json_logprob(token.logprob)}
            for token_id, logprob in token.top.items():
                entry.setdefault(self._text(token_id), json_logprob(logprob))
            top.append(entry)
        return {
            "tokens": texts,
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
