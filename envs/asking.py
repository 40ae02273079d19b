"""Asking the server and telling what came of it: every answer and every failure is journaled, counted and shown.

A failed request is never sent again. Whoever asked may ask for something new, after the wait that `ask` has made.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from envs.board import Board
from envs.connection import Completion, Connection, RequestFailed, RolloutStatus
from envs.environment import Message, Sampling
from envs.journal import Journal

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 5.0
_SILENCE_S = 3.0


class Stopped(Exception):
    """The run cannot go on. The message says why and what to do."""


class VersionNotLoaded(Exception):
    """A pinned version is no longer served."""


class Asking:
    """note: shows a line. give_up_after_s: how long nothing but failures is borne."""

    def __init__(
        self,
        connection: Connection,
        journal: Journal,
        board: Board,
        note: Callable[[str], None],
        *,
        give_up_after_s: float,
    ) -> None:
        self._connection = connection
        self._journal = journal
        self._board = board
        self._note = note
        self._give_up_after_s = give_up_after_s
        self._failing_since: float | None = None
        self._failures_in_a_row = 0
        self._outstanding = 0
        self._silent_since = monotonic()

    def waiting(self) -> str | None:
        """A sentence when requests have been out for a while and none comes back."""
        seconds = monotonic() - self._silent_since
        if not self._outstanding or seconds < _SILENCE_S:
            return None
        return f"waiting: no answer to {self._outstanding} requests for {seconds:.0f} s"

    async def ask(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        rollout: str | None = None,
        group: str | None = None,
        train: bool = True,
        **context: Any,
    ) -> Completion | None:
        """One completion, or None if the request failed.

        rollout, group: see Connection.complete. context: goes into the journal only. Raises VersionNotLoaded, and
        Stopped if asking on is useless.
        """
        completion = await self._complete(model, messages, sampling, rollout, group, train)
        if isinstance(completion, RequestFailed):
            self.failed(completion)
            if completion.kind == "404 version_not_loaded":
                raise VersionNotLoaded from completion
            await asyncio.sleep(self._wait_after(completion))
            return None
        self.answered()
        self._board.version = max(self._board.version or 0, completion.version)
        self._journal.write(
            "completion" if train else "held_out",
            interaction=completion.interaction,
            rollout=completion.rollout,
            version=completion.version,
            answer=completion.answer,
            **({} if group is None else {"group": group}),
            **context,
        )
        return completion

    async def _complete(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Sampling,
        rollout: str | None,
        group: str | None,
        train: bool,
    ) -> Completion | RequestFailed:
        if not self._outstanding:  # nobody was asked before
            self._silent_since = monotonic()
        self._outstanding += 1
        try:
            return await self._connection.complete(model, messages, sampling, rollout=rollout, group=group, train=train)
        except RequestFailed as failure:
            return failure
        finally:
            self._outstanding -= 1
            self._silent_since = monotonic()

    async def abandon(self, rollout: str) -> None:
        """Tell the server that no more turns of this rollout will come. If it cannot be told, it will find out."""
        try:
            await self._connection.close(rollout)
        except RequestFailed as failure:
            self.failed(failure)
        else:
            self.answered()

    async def look(self, rollout: str) -> RolloutStatus:
        """Where a rollout stands. Raises RequestFailed, which the caller hands to `failed`."""
        status = await self._connection.rollout(rollout)
        self.answered()
        return status

    def answered(self) -> None:
        """A request of whatever kind had its answer."""
        self._failing_since = None
        self._failures_in_a_row = 0

    def failed(self, failure: RequestFailed) -> None:
        """Count, journal and, the first time that its kind occurs, show a failed request.

        Raises Stopped when nothing but failures has come for too long.
        """
        name = f"{failure.request}: {failure.kind}"
        if self._board.request_failed(name):
            self._note(f"request failed: {failure}")
        self._journal.write("failed", request=failure.request, kind=failure.kind, message=failure.message)
        if not failure.transient:
            return
        now = monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= self._give_up_after_s:
            raise Stopped(f"nothing but failed requests for {now - self._failing_since:.0f} s; the last: {failure}")
        self._failures_in_a_row += 1

    def _wait_after(self, failure: RequestFailed) -> float:
        """Seconds to leave the server alone. Raises Stopped where no later request can fare better."""
        if not failure.transient:
            raise Stopped(refusal(failure))
        if failure.retry_after_s is not None:
            return failure.retry_after_s
        return min(_FIRST_WAIT_S * 2 ** min(self._failures_in_a_row, 10), _LONGEST_WAIT_S)


async def check_server(connection: Connection) -> None:
    """Is it there, and does it take the key? That it is still preparing is no reason to stop."""
    try:
        await connection.check()
    except RequestFailed as failure:
        if failure.status is None:
            raise Stopped(
                f"no Evergreen server answers at {connection.url}; start one, or set EVERGREEN_URL ({failure})"
            ) from failure
        if not failure.transient:
            raise Stopped(refusal(failure)) from failure


def refusal(failure: RequestFailed) -> str:
    """What to tell the user of a request that the server will not serve however often it is sent."""
    if failure.key_refused:
        return (
            f"the server refuses the key: {failure.message}; set EVERGREEN_API_KEY to a key for inference and feedback"
        )
    return f"the server refuses the request: {failure}"


async def together(*work: Awaitable[None]) -> None:
    """Run all of it at once; the first exception cancels the rest and is raised as it is."""

    async def run(one: Awaitable[None]) -> None:
        await one

    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(run(one))
    except BaseExceptionGroup as group_error:
        first = group_error.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
