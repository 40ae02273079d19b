"""vLLM's wire format: request bodies, response bodies, errors. What is not served is refused by name."""

import time
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 2.0
_INT64 = 2**63
_NO_LOGPROB = -9999.0
"""What JSON gets in place of -inf, as in vLLM."""

_UNSERVED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "logit_bias": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
}
"""Fields of vLLM's that would change the answer, and the values (beside null) that change nothing."""


class EngineHttpError(Exception):
    """Becomes vLLM's error body."""

    def __init__(self, status: int, type_: str, message: str, parameter: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type_, "param": parameter, "code": status}}


def bad_request(message: str, parameter: str | None = None, value: object = None) -> EngineHttpError:
    if parameter is not None:
        message = f"{message} (parameter={parameter}, value={value})"
    return EngineHttpError(400, "BadRequestError", message, parameter)


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: list[Annotated[int, Field(ge=0)]] | str | None = None
    max_tokens: int | None = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None

    def check(self, vocabulary: int) -> None:
        """Raises EngineHttpError for values out of range and for fields that are not served."""
        for name, neutral in _UNSERVED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise bad_request(f"{name} is not supported by the embedded engine", name, value)
        if self.temperature is not None and not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise bad_request(
                f"temperature must be in [0, 2], got {self.temperature}.", "temperature", self.temperature
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise bad_request(f"top_p must be in (0, 1], got {self.top_p}.", "top_p", self.top_p)
        if self.top_k is not None and self.top_k < -1:
            raise bad_request(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.", "top_k", self.top_k)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens", self.max_tokens)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise bad_request(
                f"Requested sample logprobs of {self.logprobs}, which is not within 0 to {MAX_LOGPROBS}",
                "logprobs",
                self.logprobs,
            )
        if "" in self.stop_strings:
            raise bad_request("stop cannot contain an empty string.", "stop", self.stop)
        unknown = [token for token in self.stop_token_ids or [] if not 0 <= token < vocabulary]
        if unknown:
            raise bad_request(
                f"token_id(s) {unknown} in stop_token_ids are out of vocabulary", "stop_token_ids", unknown
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class LoadAdapterRequest(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    lora_name: str


class CollectiveRpcRequest(BaseModel):
    """vLLM's way of calling a method of every worker."""

    method: str
    args: list[Any] = Field(default_factory=list)
    named: dict[str, Any] = Field(default_factory=dict, validation_alias=AliasChoices("kwargs"))
    timeout: float | None = None

    def weights_path(self) -> str:
        """The directory that reload_weights, the one method that is served, is asked to load."""
        if self.method != "reload_weights":
            raise bad_request(
                f"The embedded engine has no method {self.method}, only reload_weights", "method", self.method
            )
        path = self.named.get("weights_path")
        if self.args or set(self.named) != {"weights_path"} or not isinstance(path, str):
            raise bad_request(
                "The embedded engine reloads from a weights_path, and takes nothing else", "kwargs", self.named
            )
        return path


class UpdateWeightVersionRequest(BaseModel):
    new_version: str


def completion_body(
    request_id: str, created: int, model: str, choice: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def chunk_body(request_id: str, created: int, model: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": request_id, "object": "text_completion", "created": created, "model": model, "choices": [choice]}


def usage_body(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def model_body(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "evergreen",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def json_logprob(value: float) -> float:
    return max(value, _NO_LOGPROB)
