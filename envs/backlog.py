"""The closed loop: how many of our rollouts the learner has not dealt with yet, and waiting until it has.

Without it a fast engine outruns the learner, and most of what is sampled is too old to train by the time it is read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic

from envs.connection import RequestFailed, RolloutStatus

_LOOKS_AT_ONCE = 8
UNKNOWN = RolloutStatus("unknown", "the server does not know it")


class Backlog:
    """At most `limit` rollouts that are asked for, or answered and neither trained nor skipped.

    look: asks the server where a rollout stands. failed: told of every look that failed.

    The server is only asked while the backlog is full, two looks every `interval_s`: at a rollout known to be in
    training, and at the one not looked at for longest. An update finishes many rollouts in one transaction, so only
    when a look finds one finished are all the others looked at too.
    """

    def __init__(
        self,
        look: Callable[[str], Awaitable[RolloutStatus]],
        failed: Callable[[RequestFailed], None],
        *,
        limit: int,
        interval_s: float = 1.0,
    ) -> None:
        self._look = look
        self._failed = failed
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._interval_s = interval_s
        self._unfinished: dict[str, None] = {}
        """In order of the last look, oldest first."""
        self._moved_at = monotonic()
        """When a place was last taken or given back."""
        self.statuses: dict[str, RolloutStatus] = {}
        """Every rollout's status when last seen."""

    async def reserve(self) -> None:
        """Wait for room, and take it for a rollout that is about to be asked for."""
        await self._slots.acquire()
        self._moved_at = monotonic()

    def give_back(self) -> None:
        """The reserved place is not needed: its request failed."""
        self._slots.release()
        self._moved_at = monotonic()

    def add(self, rollout: str) -> None:
        """The reserved place now belongs to this rollout, until it is finished."""
        self._unfinished[rollout] = None
        self.statuses[rollout] = RolloutStatus("open", None)

    def seen(self, rollout: str, status: RolloutStatus) -> None:
        """The server said where the rollout stands."""
        self.statuses[rollout] = status
        if rollout in self._unfinished:
            del self._unfinished[rollout]
            if status.finished:
                self.give_back()
            else:
                self._unfinished[rollout] = None

    def drop(self, rollout: str) -> None:
        """Wait for this rollout no longer: it will never be trained."""
        if rollout in self._unfinished:
            del self._unfinished[rollout]
            self.give_back()

    def waiting(self) -> str | None:
        """Why nothing is asked: a sentence while the backlog has been full for a second or more."""
        seconds = monotonic() - self._moved_at
        if not self._slots.locked() or seconds < 1:
            return None
        return f"waiting: {self._limit} rollouts not trained yet for {seconds:.0f} s"

    async def watch(self, done: asyncio.Event) -> None:
        """Look at rollouts while the backlog is full, until `done`."""
        while not done.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), self._interval_s)
            if not self._slots.locked():
                continue
            before = len(self._unfinished)
            training = [r for r in self._unfinished if self.statuses[r].state == "training"][:1]
            await self._look_at(training + [r for r in self._unfinished if r not in training][:1])
            if len(self._unfinished) < before:
                await self.look_at_all()

    async def look_at_all(self) -> None:
        await self._look_at(list(self._unfinished))

    async def _look_at(self, rollouts: Sequence[str]) -> None:
        """Stops at the first failure: a server that does not answer one look is not asked for the rest."""
        for start in range(0, len(rollouts), _LOOKS_AT_ONCE):
            group = rollouts[start : start + _LOOKS_AT_ONCE]
            if not all(await asyncio.gather(*(self._look_at_one(rollout) for rollout in group))):
                return

    async def _look_at_one(self, rollout: str) -> bool:
        try:
            status = await self._look(rollout)
        except RequestFailed as failure:
            self._failed(failure)
            if failure.status != 404:
                return False
            self.drop(rollout)
            self.statuses[rollout] = UNKNOWN
            return True
        self.seen(rollout, status)
        return True
