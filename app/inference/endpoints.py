"""/v1/chat/completions, /v1/completions and /v1/models."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from app.auth import InferenceKey, may_use
from app.body import json_body, off_loop_if_large, read_object
from app.db.models import ApiKey, Policy
from app.db.repositories.policies import get_policy, list_policies
from app.errors import InvalidRequest, NotFound
from app.inference.interaction import Call
from app.inference.labels import read_labels
from app.inference.messages import plain_messages
from app.inference.replies import ChatFormat, CompletionFormat
from app.inference.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from app.inference.respond import respond
from app.inference.routing import Target, find_target, policy_and_number
from app.inference.sampling import plan_sampling
from app.inference.trainability import untrainable
from app.service import ServiceDep

router = APIRouter(prefix="/v1", tags=["inference"])

RolloutHeader = Annotated[str | None, Header(alias="X-Rollout-Id")]


@router.post("/chat/completions", openapi_extra=json_body(ChatRequest))
async def chat_completions(
    request: Request, service: ServiceDep, key: InferenceKey, x_rollout_id: RolloutHeader = None
) -> Response:
    """OpenAI's chat completion by a policy's live version, or by a pinned one (`name@version`)."""
    value, body = await read_object(request)
    asked = read_chat(value)
    messages = plain_messages(asked.messages)
    target = await find_target(service, key, asked.model)
    prompt_ids = await off_loop_if_large(len(body), lambda: target.renderer.render(messages))
    call = _call(key, target, asked, prompt_ids, x_rollout_id, body, target.renderer.stop_token_ids)
    return await respond(
        request,
        service,
        call,
        ChatFormat(logprobs=bool(asked.logprobs)),
        stream=bool(asked.stream),
        include_usage=asked.wants_usage,
    )


@router.post("/completions", openapi_extra=json_body(CompletionRequest))
async def completions(
    request: Request, service: ServiceDep, key: InferenceKey, x_rollout_id: RolloutHeader = None
) -> Response:
    """OpenAI's text completion of one prompt, given as text or token ids."""
    value, body = await read_object(request)
    asked = read_completion(value)
    target = await find_target(service, key, asked.model)
    prompt_ids = await off_loop_if_large(len(body), lambda: _prompt_ids(target, asked.prompt))
    call = _call(key, target, asked, prompt_ids, x_rollout_id, body, ())
    return await respond(
        request,
        service,
        call,
        CompletionFormat(logprobs=asked.logprobs is not None),
        stream=bool(asked.stream),
        include_usage=asked.wants_usage,
    )


@router.get("/models")
async def models(service: ServiceDep, key: InferenceKey) -> dict[str, Any]:
    """The policies that the key may use."""
    policies = await service.read(list_policies)
    return {"object": "list", "data": [_model(policy) for policy in policies if may_use(key, policy)]}


@router.get("/models/{name}")
async def model(name: str, service: ServiceDep, key: InferenceKey) -> dict[str, Any]:
    """One policy, or one of its versions that is loaded, as `name@version`."""
    policy_name, number = policy_and_number(name)

    def work(session: Session) -> Policy:
        policy = get_policy(session, policy_name)
        if not may_use(key, policy):
            raise NotFound(
                f"The model {name!r} does not exist for this API key; GET /v1/models lists those that do.",
                code="model_not_found",
                param="model",
            )
        return policy

    policy = await service.read(work)
    if number is not None:
        await service.router.rows(policy.id, number)  # raises what a completion by it would be answered
    return _model(policy) | {"id": name}


def _model(policy: Policy) -> dict[str, Any]:
    return {
        "id": policy.name,
        "object": "model",
        "created": int(policy.created_at.timestamp()),
        "owned_by": "evergreen",
        "live_version": policy.live,
    }


def _call(
    key: ApiKey,
    target: Target,
    asked: ChatRequest | CompletionRequest,
    prompt_ids: list[int],
    rollout_header: str | None,
    body: bytes,
    stop_token_ids: tuple[int, ...],
) -> Call:
    labels = read_labels(asked.metadata, rollout_header)
    sampling = plan_sampling(
        asked,
        target.policy,
        prompt_tokens=len(prompt_ids),
        context_length=target.renderer.context_length,
        stop_token_ids=stop_token_ids,
    )
    why_not = untrainable(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        opted_out=labels.opted_out,
    )
    return Call(key, target, prompt_ids, sampling, labels, why_not, body)


def _prompt_ids(target: Target, prompt: str | Sequence[Any]) -> list[int]:
    """The token ids of the one prompt. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return target.renderer.encode(prompt)
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _prompt_ids(target, prompt[0])
    size = target.renderer.vocabulary_size
    for index, token in enumerate(prompt):
        if isinstance(token, str | list):
            raise InvalidRequest(
                "One prompt per request is served: send a text or a list of token ids.",
                code="unsupported_parameter",
                param="prompt",
            )
        if type(token) is not int or not 0 <= token < size:
            raise InvalidRequest(
                f"'prompt[{index}]' is no token id of this model: send integers from 0 to {size - 1}.",
                code="invalid_value",
                param=f"prompt[{index}]",
            )
    return list(prompt)
