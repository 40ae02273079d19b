"""A request's sampling fields -> what the engine is asked for, within the model's context."""

from app.db.models import Policy
from app.engine.client import Sampling
from app.errors import InvalidRequest
from app.inference.requests import ChatRequest, CompletionRequest
from app.inference.trainability import MIN_TRAINED_TEMPERATURE

DEFAULT_CHAT_TOKENS = 1024
"""Most tokens of a chat completion that names no limit (a client that wants more says so)."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions."""


def plan_sampling(
    asked: ChatRequest | CompletionRequest,
    policy: Policy,
    *,
    prompt_tokens: int,
    context_length: int,
    stop_token_ids: tuple[int, ...],
) -> Sampling:
    """Raises InvalidRequest where prompt and completion do not fit the context."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    top_k = max(asked.top_k or 0, 0)
    if policy.sampling == "override":
        # every answer is to be trained: sample at a trainable temperature and with nothing else
        temperature = temperature if temperature >= MIN_TRAINED_TEMPERATURE else 1.0
        top_p, top_k = 1.0, 0
    return Sampling(
        max_tokens=_max_tokens(asked, prompt_tokens, context_length),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=asked.seed,
        stop=asked.stops,
        stop_token_ids=stop_token_ids,
    )


def _max_tokens(asked: ChatRequest | CompletionRequest, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    if prompt_tokens == 0:
        raise InvalidRequest("The prompt is empty: send at least one token.", code="empty_prompt", param="prompt")
    if room < 1:
        raise InvalidRequest(
            f"The prompt has {prompt_tokens} tokens and the model's context holds {context_length}, completion "
            "included: shorten the prompt.",
            code="context_length_exceeded",
        )
    wanted = asked.wanted_tokens
    if wanted is None:
        return min(room, DEFAULT_CHAT_TOKENS if isinstance(asked, ChatRequest) else DEFAULT_COMPLETION_TOKENS)
    if wanted > room:
        raise InvalidRequest(
            f"The prompt has {prompt_tokens} tokens and {wanted} more are asked for, but the model's context holds "
            f"{context_length}: ask for at most {room}, or shorten the prompt.",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return wanted
