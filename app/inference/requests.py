"""The bodies of /v1/chat/completions and /v1/completions: what is read, and what is refused by name.

Shapes: https://platform.openai.com/docs/api-reference/chat/create and .../completions/create. A field that would
change the meaning of the answer and is not served is an error that names it; any other unknown field is ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from app.body import Body, validated
from app.errors import InvalidRequest

MAX_STOPS = 4
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(Body):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(Body):
    """What both endpoints read. None is the same as absent."""

    model_config = ConfigDict(extra="ignore")

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    """vLLM's field; 0 and -1 turn it off."""
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    stop: StopText | list[StopText] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)] | bool] | None = Field(
        None, max_length=16
    )

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop texts are served, not {len(value)}")
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' goes with 'stream': true")
        return self

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    """Read by app/inference/messages.py."""
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    prompt: str | list[Any]
    """One prompt: a text or its token ids; both also inside a list of one."""
    logprobs: int | None = Field(None, ge=0)
    """0: the sampled tokens' own."""

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens


NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "top_logprobs": (0,),
    "suffix": ("",),
    "echo": (False,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields of OpenAI's or vLLM's that would change the answer, with the values that ask for nothing (as null does)."""

CHAT_NOT_SERVED = NOT_SERVED | {"add_special_tokens": (False,)}
"""Its special tokens are those of the template."""
COMPLETION_NOT_SERVED = NOT_SERVED | {"add_special_tokens": (True,)}
"""A text gets the tokenizer's own."""


def refuse_unserved(value: Mapping[str, Any], not_served: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises InvalidRequest(unsupported_parameter) for the first field that asks for what is not served."""
    for name, neutral_values in not_served.items():
        asked = value.get(name)
        if asked is None or any(_same(asked, neutral) for neutral in neutral_values):
            continue
        message = f"'{name}' is not served: leave it out."
        if name in ("tools", "functions"):
            message = "tools are not served by this policy yet: leave them out, or describe them in a message."
        elif name in ("n", "best_of"):
            message = f"'{name}' above 1 is not served: send one request per completion."
        elif name == "top_logprobs":
            message = "'top_logprobs' above 0 is not served: 'logprobs': true gives the sampled tokens' own."
        raise InvalidRequest(message, code="unsupported_parameter", param=name)


def _same(asked: Any, neutral: Any) -> bool:
    # In Python True == 1; in JSON it is another thing
    return asked == neutral and isinstance(asked, bool) == isinstance(neutral, bool)


def read_chat(value: dict[str, Any]) -> ChatRequest:
    refuse_unserved(value, CHAT_NOT_SERVED)
    return validated(ChatRequest, value)


def read_completion(value: dict[str, Any]) -> CompletionRequest:
    refuse_unserved(value, COMPLETION_NOT_SERVED)
    request = validated(CompletionRequest, value)
    if request.logprobs:
        raise InvalidRequest(
            "'logprobs' above 0 is not served: send 0 for the sampled tokens' own log-probs.",
            code="unsupported_parameter",
            param="logprobs",
        )
    return request
