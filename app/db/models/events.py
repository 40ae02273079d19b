from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import JSON, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column


class Event(Base):
    """What an operator should know: failed canaries, rejected versions, lost leases, swept orphans."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_at", "at"),)

    id: Mapped[UUID] = id_column()
    at: Mapped[datetime] = created_column()
    kind: Mapped[str] = mapped_column(String(64))
    policy_id: Mapped[UUID | None] = mapped_column(ForeignKey("policies.id"))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(JSON(), default=dict)
