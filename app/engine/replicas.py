"""Routing: which replica serves this request, under which adapter name. Read from the database per request."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self
from uuid import UUID

from sqlalchemy.orm import Session

from app.db.models import Policy
from app.db.repositories.replicas import RouteRow, is_unserved, routes
from app.db.session import Database
from app.errors import ApiError, NotFound, Unavailable

RETRY_AFTER_S = "2"


class Route:
    """One request's place on a replica. `release` it (or leave its `with`) when the request has ended."""

    def __init__(self, row: RouteRow, in_flight: Counter[str]):
        self.url = row.url
        self.adapter_name = row.adapter_name
        self.version = row.version
        self._in_flight: Counter[str] | None = in_flight
        in_flight[row.url] += 1

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

    async def pick(self, policy_id: UUID, number: int | None = None, *, avoid: Collection[str] = ()) -> Route:
        """The healthy replica with the fewest requests of this process that has the version loaded and verified.

        Args:
            number: a pinned version; None: the policy's live one.
            avoid: replicas that could not serve this request.

        Raises:
            NotFound: version_not_loaded (a pinned version that no replica has loaded).
            Unavailable: policy_preparing (nothing was deployed yet), no_replica (no healthy engine has it),
                base_model_not_served (every engine serves another base model).
        """
        return self.choose(await asyncio.to_thread(self._read, policy_id, number, avoid))

    def choose(self, rows: Sequence[RouteRow]) -> Route:
        """The one of `candidates` with the fewest requests of this process."""
        return Route(min(rows, key=lambda row: self._in_flight[row.url]), self._in_flight)

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
    if number is not None and number != live:
        return NotFound(
            f"Version {number} is not loaded. The live version is {live}; the last few versions and pinned ones stay "
            "loaded. Use the policy's name alone for the live version.",
            code="version_not_loaded",
            param="model",
        )
    return Unavailable(
        f"No healthy engine has version {live} loaded right now. Try again in a few seconds; an operator sees the "
        "cause under /admin/replicas and in `evergreen status`.",
        code="no_replica",
        headers={"Retry-After": RETRY_AFTER_S},
    )
