"""ChatML for the `renderers` package, typed: the shape that SmolLM2, Qwen2.5 and others were trained on.

    <|im_start|>ROLE\\nTEXT<|im_end|>\\n ... <|im_start|>assistant\\n

Texts go through a tokenizer that never yields a special token's id (render.PlainTextTokenizer), so a text that spells
`<|im_end|>` stays text. One deviation from the models' own templates: an assistant's text is encoded apart from its
`assistant\\n` header, because that is how it was sampled; the ids differ only where the text starts with white space.
"""

from typing import ClassVar

from renderers import BaseRendererConfig, Message, ParsedResponse, RenderedTokens, Tokenizer, ToolSpec

START, END = "<|im_start|>", "<|im_end|>"

Part = tuple[list[int], bool]
"""Token ids, and whether a model samples them."""


class ChatMLConfig(BaseRendererConfig):
    default_system: str | None = None
    """System prompt that the model's template puts in front of a conversation without one."""

    _internal_fields: ClassVar[frozenset[str]] = frozenset({"default_system"})


class ChatMLRenderer:
    """`renderers.Renderer` for ChatML: plain texts, no tools."""

    config_class = ChatMLConfig
    is_prefix_stable = True
    """Each message's tokens depend on that message alone."""

    def __init__(self, tokenizer: Tokenizer, config: ChatMLConfig):
        self._tokenizer = tokenizer
        self._start = tokenizer.convert_tokens_to_ids(START)
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._newline = self._encode("\n")
        self._generation_prompt = [self._start, *self._encode("assistant\n")]
        self._default_system: list[Part] = []
        if config.default_system is not None:
            self._default_system = self._parts({"role": "system", "content": config.default_system})

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _parts(self, message: Message) -> list[Part]:
        role, text = message["role"], message["content"]
        if not isinstance(text, str):
            raise TypeError(f"a {role} message holds {type(text).__name__}; ChatML takes plain texts")
        if role == "assistant":
            return [(self._generation_prompt, False), ([*self._encode(text), self._end], True), (self._newline, False)]
        return [([self._start, *self._encode(f"{role}\n{text}"), self._end, *self._newline], False)]

    def render(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Token ids of the conversation, each with its message's index (-1: the template's own) and a sampled mask."""
        if tools:
            raise ValueError("ChatML as trained into these models has no place for tools")
        parts: list[tuple[int, Part]] = []
        if not messages or messages[0]["role"] != "system":
            parts += [(-1, part) for part in self._default_system]
        for index, message in enumerate(messages):
            parts += [(index, part) for part in self._parts(message)]
        if add_generation_prompt:
            parts.append((-1, (self._generation_prompt, False)))
        return RenderedTokens(
            token_ids=[token for _, (ids, _) in parts for token in ids],
            message_indices=[index for index, (ids, _) in parts for _ in ids],
            sampled_mask=[sampled for _, (ids, sampled) in parts for _ in ids],
            message_roles=[message["role"] for message in messages],
        )

    def render_ids(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """As `render`, the ids alone."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The completion's text; without tools or reasoning ChatML has nothing else in it."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] == self._end else token_ids
        return ParsedResponse(content=self._tokenizer.decode(ids))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """None: re-render. Whether the logged ids are a prefix of that is checked where the turn is logged."""
        return None
