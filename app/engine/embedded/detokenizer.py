"""Text from tokens as they come, and the strings that end it."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "�"
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Text is given out only when it can no longer change: whole characters, and nothing that may become a stop string.

    tokenizers' own DecodeStream does the first too, but fails on byte sequences that are no UTF-8, which a model that
    samples freely produces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._held_back = max((len(s) for s in stop), default=1) - 1
        # some tokenizers write a token differently at the start of a text, so decoding begins in the prompt
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._window = 0
        """Decoding starts at this token ..."""
        self._read = len(self._ids)
        """... and the text of the tokens before this one is known."""
        self._text = ""
        self._given = 0

    def push(self, token_id: int) -> str | None:
        """Takes a token; the stop string that it completes, if any, at which the text then ends."""
        self._ids.append(token_id)
        known = self._decode(self._window, self._read)
        text = self._decode(self._window, len(self._ids))
        if text.endswith(_INCOMPLETE):
            return None
        new = text[len(known) :]
        self._window, self._read = self._read, len(self._ids)
        searched = max(0, len(self._text) - self._held_back)
        self._text += new
        matches = [(self._text.find(s, searched), s) for s in self._stop]
        found = [(at, s) for at, s in matches if at >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda match: match[0])
        self._text = self._text[:at]
        return stop

    def take(self, *, finished: bool) -> str:
        """The text that has become certain since the last call."""
        end = len(self._text) if finished else max(self._given, len(self._text) - self._held_back)
        new = self._text[self._given : end]
        self._given = end
        return new

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip_special_tokens)
