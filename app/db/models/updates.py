from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column
from app.rollouts.states import UpdateState


class Update(Base):
    """One learner step. A running row is the lease on its policy."""

    __tablename__ = "updates"
    __table_args__ = (
        Index(
            "uq_updates_one_running_per_policy",
            "policy_id",
            unique=True,
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
        Index("ix_updates_policy", "policy_id", "id"),
    )

    id: Mapped[UUID] = id_column()
    policy_id: Mapped[UUID] = mapped_column(ForeignKey("policies.id"))
    state: Mapped[str] = mapped_column(String(16), default=UpdateState.RUNNING)
    owner: Mapped[str] = mapped_column(String(128))
    lease_until: Mapped[datetime]
    base_version: Mapped[int] = mapped_column(Integer)
    """The head at the claim."""
    version: Mapped[int | None] = mapped_column(Integer)
    """The version it made; None: a critic warm-up, or not done."""
    settings: Mapped[dict[str, Any]]
    health: Mapped[dict[str, Any] | None]
    seconds: Mapped[dict[str, Any] | None]
    """Wall seconds per phase."""
    provenance: Mapped[dict[str, Any] | None]
    """Seeds, library versions, row order."""
    error: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime] = created_column()
    ended_at: Mapped[datetime | None]


class UpdateRollout(Base):
    """A rollout as one update saw it: its return is a snapshot taken at the claim."""

    __tablename__ = "update_rollouts"

    update_id: Mapped[UUID] = mapped_column(ForeignKey("updates.id"), primary_key=True)
    rollout_id: Mapped[UUID] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, index=True)
    position: Mapped[int] = mapped_column(Integer)
    total_return: Mapped[float] = mapped_column(Float)
    staleness: Mapped[int] = mapped_column(Integer)
    """Largest among its trainable interactions."""
    action_tokens: Mapped[int | None] = mapped_column(Integer)
    advantage_mean: Mapped[float | None] = mapped_column(Float)
    advantage_std: Mapped[float | None] = mapped_column(Float)
    masked_share: Mapped[float | None] = mapped_column(Float)
    """Share of its action tokens that the clip (DIS) rejected, mean over the policy steps."""
    residual: Mapped[float | None] = mapped_column(Float)
    """Its return minus what the critic expected at its first action token, before it had seen it; null: no critic."""
