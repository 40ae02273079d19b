"""Routing: which replica serves this request, under which adapter name. Read from the database per request.

Where an engine's own weights are swapped, requests wait here for the end: nobody else knows when it has come.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self
from uuid import UUID

from sqlalchemy.orm import Session

from app.db.models import Policy
from app.db.repositories.replicas import RouteRow, is_unserved, replicas_for, routes
from app.db.repositories.swaps import SWAP_OVERDUE_S, is_swapped, swap_age_s
from app.db.repositories.versions import get_version
from app.db.session import Database
from app.errors import ApiError, NotFound, RateLimited, Unavailable

RETRY_AFTER_S = "2"
SWAP_WAIT_S = SWAP_OVERDUE_S
"""A request waits so long for a swap of weights, and not at all for one that is older."""
SWAP_POLL_S = 0.05
"""How often one process asks whether a swap has ended, for all requests that wait for it."""


class WeightsSwapping(RateLimited):
    """Every engine that could serve it is closed for a swap of weights."""

    def __init__(self, began_s_ago: float):
        super().__init__(
            "The engine's weights are being replaced, and it takes longer than it should: try again in a few seconds. "
            "An operator sees the cause under /admin/replicas and /admin/events.",
            code="weights_swapping",
            headers={"Retry-After": RETRY_AFTER_S},
        )
        self.stuck = began_s_ago > SWAP_WAIT_S
        """It is overdue: nobody knows when it will end, so waiting makes no sense."""


class Route:
    """One request's place on a replica. `release` it (or leave its `with`) when the request has ended."""

    def __init__(self, row: RouteRow, in_flight: Counter[str]):
        self.url = row.url
        self.adapter_name = row.adapter_name
        self.version = row.version
        self.own_weights = row.own_weights
        self._in_flight: Counter[str] | None = in_flight
        in_flight[row.url] += 1

    @property
    def model(self) -> str | None:
        """What the engine knows it by; None: it is the engine's own weights."""
        return None if self.own_weights else self.adapter_name

    def release(self) -> None:
        """Count the request as ended. Further calls do nothing."""
        if self._in_flight is not None:
            self._in_flight[self.url] -= 1
            self._in_flight = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Router:
    """One per app process: what is in flight is counted per process."""

    def __init__(self, database: Database):
        self._database = database
        self._in_flight: Counter[str] = Counter()
        self._swaps: dict[UUID, asyncio.Task[None]] = {}

    async def pick(self, policy_id: UUID, number: int | None = None, *, avoid: Collection[str] = ()) -> Route:
        """The healthy replica with the fewest requests of this process that has the version loaded and verified.

        Args:
            number: a pinned version; None: the policy's live one.
            avoid: replicas that could not serve this request.

        Raises:
            NotFound: version_not_loaded (a pinned version that no replica has loaded).
            Unavailable: policy_preparing (nothing was deployed yet), no_replica (no healthy engine has it),
                base_model_not_served (every engine serves another base model).
            WeightsSwapping: a swap of weights did not end within SWAP_WAIT_S.
        """
        return self.choose(await self.rows(policy_id, number, avoid))

    async def rows(self, policy_id: UUID, number: int | None, avoid: Collection[str] = ()) -> list[RouteRow]:
        """Where `pick` may go, after waiting for the end of a swap. Raises what `pick` raises."""
        until = asyncio.get_running_loop().time() + SWAP_WAIT_S
        while True:
            try:
                return await asyncio.to_thread(self._read, policy_id, number, avoid)
            except WeightsSwapping as swapping:
                left_s = until - asyncio.get_running_loop().time()
                if swapping.stuck or left_s <= 0:
                    raise
                await self._swap_ended(policy_id, left_s)

    async def refused_for_swap(self, policy_id: UUID, route: Route) -> bool:
        """Whether an engine that would not take a request may have been paused: vLLM answers then as with a full
        queue."""
        if not route.own_weights:
            return False

        def read() -> bool:
            with self._database.read() as session:
                return is_swapped(session, route.url, policy_id, route.version)

        return await asyncio.to_thread(read)

    def choose(self, rows: Sequence[RouteRow]) -> Route:
        """The one of `candidates` with the fewest requests of this process."""
        return Route(min(rows, key=lambda row: self._in_flight[row.url]), self._in_flight)

    async def _swap_ended(self, policy_id: UUID, timeout_s: float) -> None:
        """Returns when the policy's swap may have ended, at the latest after `timeout_s`."""
        watch = self._swaps.get(policy_id)
        if watch is None or watch.done():
            watch = self._swaps[policy_id] = asyncio.create_task(self._watch(policy_id))
        await asyncio.wait({watch}, timeout=timeout_s)

    async def _watch(self, policy_id: UUID) -> None:
        def is_under_way() -> bool:
            with self._database.read() as session:
                age_s = swap_age_s(session, session.get_one(Policy, policy_id))
                return age_s is not None and age_s <= SWAP_WAIT_S and not routes(session, policy_id, None)

        while await asyncio.to_thread(is_under_way):  # noqa: ASYNC110 (another process ends it)
            await asyncio.sleep(SWAP_POLL_S)

    def _read(self, policy_id: UUID, number: int | None, avoid: Collection[str]) -> list[RouteRow]:
        with self._database.read() as session:
            return candidates(session, policy_id, number, avoid)


def candidates(session: Session, policy_id: UUID, number: int | None, avoid: Collection[str] = ()) -> list[RouteRow]:
    """Where `pick` may go, for callers that read more in the same transaction. Raises what `pick` raises."""
    rows = [row for row in routes(session, policy_id, number) if row.url not in avoid]
    if rows:
        return rows
    raise _nothing_loaded(session, session.get_one(Policy, policy_id), number)


def _nothing_loaded(session: Session, policy: Policy, number: int | None) -> ApiError:
    live = policy.live
    swap_s = swap_age_s(session, policy)
    if swap_s is not None and live is not None:
        return WeightsSwapping(swap_s)
    if is_unserved(session, policy.base_model):
        return Unavailable(
            "No engine serves the base model of this policy. An operator must start one on it; /admin/events says "
            "which base model it is, /admin/replicas what each engine serves.",
            code="base_model_not_served",
            headers={"Retry-After": RETRY_AFTER_S},
        )
    if live is None:
        return Unavailable(
            "This policy is being prepared: its first version is not loaded yet. Try again in a few seconds.",
            code="policy_preparing",
            headers={"Retry-After": RETRY_AFTER_S},
        )
    runs = any(replica.healthy for replica in replicas_for(session, policy.base_model))
    if number not in (None, live) and (runs or get_version(session, policy.id, number) is None):
        kept = (
            "and this policy's engines have one version at a time"
            if policy.training == "full"
            else "the last few versions and pinned ones stay loaded"
        )
        return NotFound(
            f"Version {number} is not loaded. The live version is {live}; {kept}. Use the policy's name alone for the "
            "live version.",
            code="version_not_loaded",
            param="model",
        )
    return Unavailable(
        f"No healthy engine has version {live if number is None else number} loaded right now. Try again in a few "
        "seconds; an operator sees the cause under /admin/replicas and in `evergreen status`.",
        code="no_replica",
        headers={"Retry-After": RETRY_AFTER_S},
    )
