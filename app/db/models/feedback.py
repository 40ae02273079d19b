from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Boolean, Float, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column
from app.rollouts.states import FeedbackStatus


class Feedback(Base):
    """Append-only. The newest value per (target, metric) replaces the older, which becomes `superseded`."""

    __tablename__ = "feedback"
    __table_args__ = (
        UniqueConstraint("key_id", "idempotency_key"),
        Index("ix_feedback_rollout", "rollout_id"),
    )

    id: Mapped[UUID] = id_column()
    rollout_id: Mapped[UUID] = mapped_column(ForeignKey("rollouts.id"))
    interaction_id: Mapped[UUID | None] = mapped_column(ForeignKey("interactions.id"))
    """Set: a turn's reward. None: the rollout's own."""
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    metric: Mapped[str] = mapped_column(String(64), default="reward")
    value: Mapped[float | None] = mapped_column(Float)
    final: Mapped[bool] = mapped_column(Boolean)
    outcome: Mapped[str | None] = mapped_column(String(32))
    comment: Mapped[str | None] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16), default=FeedbackStatus.APPLIED)
    idempotency_key: Mapped[str | None] = mapped_column(String(128))
    body_sha256: Mapped[str] = mapped_column(String(64))
    answer: Mapped[dict[str, Any]]
    """The reply, given again word for word when the same idempotency key and body come again."""
    created_at: Mapped[datetime] = created_column()
