"""Paging that the admin lists share: newest first, `?limit=&after=ID`, and the id to continue after."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol
from uuid import UUID

from fastapi import Query
from sqlalchemy.orm import Session

from app.db.repositories.policies import get_policy

Limit = Annotated[int, Query(ge=1, le=1000)]
DEFAULT_LIMIT = 100
Json = dict[str, Any]


class _Row(Protocol):
    @property
    def id(self) -> Any: ...


def page(rows: Sequence[_Row], shown: list[Json], limit: int) -> Json:
    """`next` is what `after` must be for the following page; null on the last one."""
    return {"data": shown, "next": str(rows[-1].id) if len(rows) == limit else None}


def policy_id_of(session: Session, name: str | None) -> UUID | None:
    """The filter for an optional `?policy=`. NotFound (model_not_found) for an unknown name."""
    return None if name is None else get_policy(session, name).id
