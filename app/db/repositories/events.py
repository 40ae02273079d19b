"""Events: what an operator should know."""

from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import Event


def add_event(
    session: Session, kind: str, message: str, *, policy_id: UUID | None = None, data: dict[str, Any] | None = None
) -> Event:
    event = Event(kind=kind, message=message, policy_id=policy_id, data=data or {})
    session.add(event)
    session.flush()
    return event


def list_events(session: Session, limit: int = 100, before: UUID | None = None) -> list[Event]:
    """Newest first, at most `limit`, of those older than the event `before`."""
    query = select(Event).order_by(Event.id.desc()).limit(limit)
    if before is not None:
        query = query.where(Event.id < before)
    return list(session.scalars(query))
