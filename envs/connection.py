"""The server as an agent sees it: OpenAI's API through OpenAI's client, and rewards.

Nothing else goes over the wire; what an environment knows (labels, phases, mappings) cannot, since no function here
takes it. Every request that is not answered with a usable 2xx raises RequestFailed; nothing is retried here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from envs.environment import Message, Sampling


@dataclass(frozen=True)
class Completion:
    """One answered request. `version` is the policy version that the server says it sampled with."""

    interaction: str
    rollout: str
    version: int
    answer: str
    seconds: float


@dataclass(frozen=True)
class RolloutStatus:
    """Where the server's rollout stands: open, ready, training, trained or skipped, and for the last one why."""

    state: str
    reason: str | None

    @property
    def finished(self) -> bool:
        return self.state in ("trained", "skipped")


class RequestFailed(Exception):
    """A request without a usable answer.

    request: completion, feedback, state, close or models. kind: `unreachable`, `timeout`, `unusable reply`, or the
    status with the error's code. retry_after_s: what the server asked for, seconds.
    """

    def __init__(
        self, request: str, kind: str, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{request}: {kind}: {message}")
        self.request = request
        self.kind = kind
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def key_refused(self) -> bool:
        return self.status in (401, 403)

    @property
    def transient(self) -> bool:
        """Worth another try with the same body: nothing was answered, or the server says that it could not."""
        return self.status is None or self.status == 429 or self.status >= 500


class Connection:
    """Use as `async with`. url: the server's root, without /v1. timeout_s holds per request."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 120.0) -> None:
        base = f"{url.rstrip('/').removesuffix('/v1')}/v1"  # OpenAI clients name it with, others without
        self.url = base
        self._openai = openai.AsyncOpenAI(base_url=base, api_key=api_key, max_retries=0, timeout=timeout_s)
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()
        await self._http.aclose()

    async def check(self) -> None:
        """The cheapest request that needs a key: the list of models."""
        try:
            await self._openai.models.list()
        except openai.APIError as error:
            _raise_from_sdk("models", error)

    async def complete(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        rollout: str | None = None,
        group: str | None = None,
        train: bool = True,
    ) -> Completion:
        """One chat completion.

        rollout: the caller's name of the rollout that it is a turn of; None: it is a rollout of its own. group: a name
        that all rollouts of one prompt share. train=False opts it out of training. All go into `metadata`.
        """
        said = {"rollout_id": rollout, "group": group, "train": None if train else "false"}
        metadata = {name: value for name, value in said.items() if value is not None}
        started = perf_counter()
        try:
            raw = await self._openai.chat.completions.with_raw_response.create(
                model=model,
                messages=cast(list[ChatCompletionMessageParam], list(messages)),
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                metadata=metadata or openai.omit,
            )
            reply = raw.parse()
        except openai.APIError as error:
            _raise_from_sdk("completion", error)
        except ValueError as error:
            raise RequestFailed("completion", "unusable reply", f"no JSON: {error}") from error
        seconds = perf_counter() - started
        rollout = raw.headers.get("X-Rollout-Id", "")
        version = raw.headers.get("X-Policy-Version", "")
        if not (isinstance(reply, ChatCompletion) and reply.id and reply.choices and rollout and version.isdigit()):
            raise RequestFailed(
                "completion",
                "unusable reply",
                "no completion with an id, X-Rollout-Id and X-Policy-Version; is this an Evergreen server?",
            )
        return Completion(reply.id, rollout, int(version), reply.choices[0].message.content or "", seconds)

    async def reward(
        self, interaction: str, reward: float, idempotency_key: str, *, ends_named: bool = False
    ) -> dict[str, Any]:
        """Post one reward; the server's answer says what became of the rollout.

        ends_named: the interaction is the last turn of a rollout that was given a name. Any other one is a rollout of
        its own, which a reward ends by itself.
        """
        body = {"interaction_id": interaction, "reward": reward, "idempotency_key": idempotency_key}
        return await self._json("feedback", "POST", "/feedback", body | ({"final": True} if ends_named else {}))

    async def close(self, rollout: str) -> None:
        """Nothing more is to come of this rollout."""
        await self._json("close", "POST", f"/rollouts/{rollout}/close")

    async def rollout(self, rollout: str) -> RolloutStatus:
        answer = await self._json("state", "GET", f"/rollouts/{rollout}")
        return RolloutStatus(str(answer.get("state")), answer.get("reason"))

    async def _json(self, request: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise RequestFailed(request, "timeout", str(error)) from error
        except httpx.TransportError as error:
            raise RequestFailed(request, "unreachable", str(error) or type(error).__name__) from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not response.is_success:
            raise _refused(request, response.status_code, answer, response.headers.get("Retry-After"))
        if not isinstance(answer, dict):
            raise RequestFailed(request, "unusable reply", "the reply is no JSON object")
        return answer


def _raise_from_sdk(request: str, error: openai.APIError) -> NoReturn:
    if isinstance(error, openai.APIStatusError):
        body = {"error": error.body} if isinstance(error.body, dict) else None  # the SDK has unwrapped `error`
        raise _refused(request, error.status_code, body, error.response.headers.get("Retry-After")) from error
    if isinstance(error, openai.APITimeoutError):
        raise RequestFailed(request, "timeout", error.message) from error
    if isinstance(error, openai.APIConnectionError):
        raise RequestFailed(request, "unreachable", str(error.__cause__ or error.message)) from error
    raise RequestFailed(request, "unusable reply", error.message) from error


def _refused(request: str, status: int, body: Any, retry_after: str | None) -> RequestFailed:
    """A reply that is no 2xx, with OpenAI's error body where there is one."""
    error = body.get("error") if isinstance(body, dict) else None
    details = error if isinstance(error, dict) else {}
    return RequestFailed(
        request,
        f"{status} {details.get('code') or ''}".strip(),
        str(details.get("message") or "no reason given"),
        status=status,
        retry_after_s=float(retry_after) if retry_after and retry_after.isdigit() else None,
    )
