"""Messages and texts -> token ids, and back, for one base model directory.

Special tokens that appear in a caller's text are encoded as plain text: nobody closes a turn by writing `<|im_end|>`.
Models whose chat template is ChatML get the typed renderer; others their own template, through `renderers`.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from renderers import AutoRendererConfig, Message, Renderer, create_renderer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from app.errors import InvalidRequest, Unavailable
from app.inference.base_model import ModelAbsent, ModelUnreadable, read_base_model
from app.inference.chatml import END, START, ChatMLConfig, ChatMLRenderer

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello, how are you?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\n\ntwo"},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "four"},
    ],
)
"""Conversations on which a template is compared with ChatML before the typed renderer is used for it."""


class PlainTextTokenizer:
    """`renderers.Tokenizer` whose `encode` never yields a special token's id; safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def special_tokens(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts the tokenizer's own ones (a BOS, say) around them."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


class ChatRenderer:
    """What the gateway needs of a base model: its tokens, its chat format, its context length."""

    def __init__(self, directory: Path):
        """Raises ModelUnreadable where the directory holds no model as it should."""
        model = read_base_model(directory)
        hugging_face = model.tokenizer
        self.context_length = model.context_length
        self.vocabulary_size = model.vocabulary_size
        self.tokenizer = PlainTextTokenizer(hugging_face)
        self.renderer: Renderer | None = None
        self._forbidden: re.Pattern[str] | None = None
        if hugging_face.chat_template is None:
            return
        try:
            self.renderer = _chatml(hugging_face, self.tokenizer)
        except TemplateError:  # it refuses one of the probes, which ChatML would take
            self.renderer = None
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # nor does it know what messages are
            raise ModelUnreadable(f"the chat template in {directory} fails: {error!r}") from error
        if self.renderer is None:
            # These templates are rendered to one string, in which a caller's `<eos>` would be the real one
            self.renderer = create_renderer(hugging_face, AutoRendererConfig())
            specials = sorted(self.tokenizer.special_tokens, key=len, reverse=True)
            self._forbidden = re.compile("|".join(map(re.escape, specials))) if specials else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant's turn."""
        return () if self.renderer is None else tuple(self.renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the prompt. InvalidRequest where the model has no chat format or cannot hold a text."""
        if self.renderer is None:
            raise InvalidRequest(
                "This policy's base model has no chat template: use /v1/completions.", code="no_chat_template"
            )
        if self._forbidden is not None:
            self._refuse_special_tokens(messages, self._forbidden)
        try:
            return self.renderer.render_ids(list(messages), add_generation_prompt=add_generation_prompt)
        except TemplateError as refused:  # a template may insist on alternating roles, say
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {refused}", code="template_refused"
            ) from refused

    def _refuse_special_tokens(self, messages: Sequence[Message], forbidden: re.Pattern[str]) -> None:
        for index, message in enumerate(messages):
            found = forbidden.search(str(message["content"]))
            if found:
                raise InvalidRequest(
                    f"messages[{index}] contains {found.group()!r}, a control token of this model, and its chat "
                    "template cannot tell the text from the token: remove or respell it.",
                    code="special_token_in_text",
                    param=f"messages[{index}].content",
                )

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the tokenizer's own BOS where it has one."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])


def _chatml(hugging_face: PreTrainedTokenizerFast, tokenizer: PlainTextTokenizer) -> ChatMLRenderer | None:
    """The typed renderer if the model's own template is ChatML with plain conversations, else None."""
    if tokenizer.convert_tokens_to_ids(START) is None or tokenizer.convert_tokens_to_ids(END) is None:
        return None
    shown = str(hugging_face.apply_chat_template(_PROBES[0], tokenize=False))
    system = re.match(rf"{re.escape(START)}system\n(.*?){re.escape(END)}\n", shown, re.DOTALL)
    renderer = ChatMLRenderer(tokenizer, ChatMLConfig(default_system=system.group(1) if system else None))
    for probe in _PROBES:
        expected = hugging_face.apply_chat_template(probe, add_generation_prompt=True, return_dict=False)
        messages = [Message(role=m["role"], content=m["content"]) for m in probe]
        if renderer.render_ids(messages, add_generation_prompt=True) != expected:
            return None
    return renderer


class Renderers:
    """The renderers of a process, each made at its first use (about 0.3 s, in a thread)."""

    def __init__(self) -> None:
        self._by_directory: dict[str, ChatRenderer] = {}

    async def load(self, directory: str) -> ChatRenderer:
        """Raises ModelUnreadable."""
        renderer = self._by_directory.get(directory)
        if renderer is None:
            renderer = await asyncio.to_thread(ChatRenderer, Path(directory))
            self._by_directory[directory] = renderer
        return renderer

    async def get(self, directory: str) -> ChatRenderer:
        """For a request. Raises Unavailable: policy_preparing while the base model is not on disk,
        base_model_unreadable where what is there cannot be used."""
        try:
            return await self.load(directory)
        except ModelAbsent:
            raise Unavailable(
                "This policy's base model is being prepared. Try again in a few seconds.",
                code="policy_preparing",
                headers={"Retry-After": "5"},
            ) from None
        except ModelUnreadable as error:
            raise Unavailable(
                f"This policy's base model cannot be read, and an operator must repair it: {error}.",
                code="base_model_unreadable",
                headers={"Retry-After": "5"},
            ) from None
