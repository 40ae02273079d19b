"""Rollouts and rewards for people who call an Evergreen server with OpenAI's client. Imports nothing of this project.

    with rollout(OpenAI(base_url=..., api_key=...)) as episode:
        reply = episode.client.chat.completions.create(model="default", messages=[...])
        episode.reward(1.0)

The endpoints are those of docs/api.md. Address, key, timeouts and transport are the given client's.
"""

import re
from types import TracebackType
from typing import Any, Self, TypedDict, overload
from uuid import uuid4

from openai import AsyncOpenAI, BaseModel, NotFoundError, OpenAI, OpenAIError
from typing_extensions import Unpack

RETRIES = 5
"""Of a reward or a close, made by OpenAI's client with its waits (15 s in all, or what Retry-After says). Both may be
sent twice: a reward has an idempotency key, and a second close changes nothing."""

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class About(TypedDict, total=False):
    """What may be said besides the value of a reward; all of it may be left out."""

    turn: str
    """The `id` of the reply (or of a stream's chunks) that it is about, else it is about the rollout."""
    metric: str
    """`reward` (default) is trained on; any other word is kept and shown."""
    final: bool
    """Nothing more is to come. Absent: a reward of the rollout is final, all else is not."""
    outcome: str
    """`environment_error` ends the rollout and keeps it out of training; any other word is kept and shown."""
    comment: str
    idempotency_key: str
    """Absent: a random one per call. With one of your own the call itself may be repeated."""


class Standing(BaseModel):
    """Where a rollout stands."""

    state: str
    """open, ready, training, trained or skipped."""
    reason: str | None = None
    """Why it was skipped."""


class Feedback(BaseModel):
    """The server's answer: what became of the reward and of the rollout."""

    id: str
    rollout_id: str
    """The server's id of the rollout, a UUID."""
    interaction_id: str | None = None
    status: str
    """applied, superseded or late."""
    rollout: Standing
    message: str
    """The same in words."""


@overload
def rollout(client: OpenAI, rollout_id: str | None = None) -> "Rollout": ...
@overload
def rollout(client: AsyncOpenAI, rollout_id: str | None = None) -> "AsyncRollout": ...
def rollout(client: OpenAI | AsyncOpenAI, rollout_id: str | None = None) -> "Rollout | AsyncRollout":
    """A context manager for one episode (`async with` for an async client): what its `client` asks is one rollout.

    The end of the block ends the rollout. Without a final reward it is closed; if it has no reward at all, it is
    skipped. If the block raises, whatever it raises, `outcome: environment_error` is reported with the exception's
    type as the comment, which keeps the rollout out of training; the exception goes on, with a note if that could not
    be reported. What is the agent's own failure is to be caught in the block and rewarded as such. After a final reward
    the end of the block does nothing, nor does it where no call was made.

    Args:
        client: any OpenAI client of the server; it is left as it is and may serve any number of rollouts at once.
        rollout_id: the episode's name, a new one for each; None: a random one. All its calls must ask one policy.

    Raises:
        ValueError: a name that cannot be one. openai.APIError, by the end of the block: it could not be closed.
    """
    name = str(uuid4()) if rollout_id is None else rollout_id
    if not _NAME.fullmatch(name):
        raise ValueError(f"rollout_id must be 1 to 128 letters, digits, '.', '_', ':' or '-', not {name!r}")
    return Rollout(client, name) if isinstance(client, OpenAI) else AsyncRollout(client, name)


class Rollout:
    """What `rollout` makes around an `openai.OpenAI`."""

    def __init__(self, client: OpenAI, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.client = client.with_options(default_headers={"X-Rollout-Id": rollout_id})
        """The given client, except that every call belongs to this rollout."""
        self._ended = False

    def reward(self, value: float | None = None, **about: Unpack[About]) -> Feedback:
        """Post a reward; or, without a value, an outcome or a comment.

        Raises:
            openai.APIStatusError: it is not stored; the code (`reward_out_of_range`, ...) and the message say why.
            openai.APIConnectionError: after all tries nobody knows.
        """
        return self._post(_body(self.rollout_id, value, about), RETRIES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        try:
            if error is None:
                self.client.post(_close_path(self.rollout_id), cast_to=object, options={"max_retries": RETRIES})
            else:
                self._post(_error_body(self.rollout_id, error), _retries_after(error))
        except OpenAIError as failure:
            _pass_over(failure, error)

    def _post(self, body: dict[str, Any], retries: int) -> Feedback:
        feedback = self.client.post("/feedback", cast_to=Feedback, body=body, options={"max_retries": retries})
        self._ended = self._ended or _ends(body)
        return feedback


class AsyncRollout:
    """What `rollout` makes around an `openai.AsyncOpenAI`."""

    def __init__(self, client: AsyncOpenAI, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.client = client.with_options(default_headers={"X-Rollout-Id": rollout_id})
        """The given client, except that every call belongs to this rollout."""
        self._ended = False

    async def reward(self, value: float | None = None, **about: Unpack[About]) -> Feedback:
        """See Rollout.reward."""
        return await self._post(_body(self.rollout_id, value, about), RETRIES)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        try:
            if error is None:
                await self.client.post(_close_path(self.rollout_id), cast_to=object, options={"max_retries": RETRIES})
            else:
                await self._post(_error_body(self.rollout_id, error), _retries_after(error))
        except OpenAIError as failure:
            _pass_over(failure, error)

    async def _post(self, body: dict[str, Any], retries: int) -> Feedback:
        feedback = await self.client.post("/feedback", cast_to=Feedback, body=body, options={"max_retries": retries})
        self._ended = self._ended or _ends(body)
        return feedback


def _body(rollout_id: str, value: float | None, about: About) -> dict[str, Any]:
    """Of POST /v1/feedback. It names the rollout for a turn, too: the server refuses another rollout's turn."""
    said = {"idempotency_key": str(uuid4()), **about, "rollout_id": rollout_id, "reward": value}
    said["interaction_id"] = said.pop("turn", None)
    return {name: what for name, what in said.items() if what is not None}


def _error_body(rollout_id: str, error: BaseException) -> dict[str, Any]:
    """Only the exception's type: its message may hold what is nobody else's business."""
    kind = type(error)
    about: About = {"outcome": "environment_error", "comment": f"{kind.__module__}.{kind.__qualname__}"}
    return _body(rollout_id, None, about)


def _ends(body: dict[str, Any]) -> bool:
    """Whether this feedback, once stored, ends the rollout: the server's rule."""
    of_rollout = "interaction_id" not in body and "reward" in body and body.get("metric", "reward") == "reward"
    return body.get("outcome") == "environment_error" or bool(body.get("final", of_rollout))


def _close_path(rollout_id: str) -> str:
    return f"/rollouts/{rollout_id}/close"


def _retries_after(error: BaseException) -> int:
    """Whoever interrupts or cancels the block does not want to wait: it is tried once."""
    return RETRIES if isinstance(error, Exception) else 0


def _pass_over(failure: OpenAIError, error: BaseException | None) -> None:
    """The end of the block has failed. Raises what nobody else tells; the block's own exception goes before it."""
    if isinstance(failure, NotFoundError) and failure.code == "rollout_not_found":
        return  # no call was made (or none that was logged): there is nothing to end
    if error is None:
        raise failure
    error.add_note(f"The rollout could not be reported as failed, so its turns' rewards may be trained: {failure}")
