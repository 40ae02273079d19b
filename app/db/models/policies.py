from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Boolean, Float, ForeignKey, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column
from app.rollouts.states import VersionStatus


class Policy(Base):
    """A named learning model."""

    __tablename__ = "policies"

    id: Mapped[UUID] = id_column()
    name: Mapped[str] = mapped_column(String(128), unique=True)
    base_model: Mapped[str] = mapped_column(Text)
    """Local directory of the converted base model."""
    training: Mapped[str] = mapped_column(String(8), default="lora")
    settings: Mapped[dict[str, Any]]
    """LearningSettings as JSON."""
    sampling: Mapped[str] = mapped_column(String(8), default="honour")
    reward_min: Mapped[float] = mapped_column(Float, default=-1.0)
    reward_max: Mapped[float] = mapped_column(Float, default=1.0)
    head: Mapped[int | None] = mapped_column(Integer)
    """Number of the newest committed version; None until version 0 is written."""
    live: Mapped[int | None] = mapped_column(Integer)
    """Number of the version that is served; None until the first deployment is verified."""
    learning: Mapped[bool] = mapped_column(Boolean, default=True)
    probes: Mapped[list[Any] | None]
    """Canary prompts (lists of token ids), fixed at the first batch."""
    checkpoint_update_id: Mapped[UUID | None]
    """The last done update: its checkpoint is the learner's state."""
    updates_done: Mapped[int] = mapped_column(Integer, default=0)
    learner_seen_at: Mapped[datetime | None]
    """Last tick of a learn worker that looked at this policy."""
    idle_reason: Mapped[str | None] = mapped_column(Text)
    """Why that tick started no update, or why the last one was given up; None while one runs."""
    created_at: Mapped[datetime] = created_column()


class PolicyVersion(Base):
    """Immutable weights, numbered. Version 0 is an adapter whose B is zero."""

    __tablename__ = "policy_versions"
    __table_args__ = (UniqueConstraint("policy_id", "number"),)

    id: Mapped[UUID] = id_column()
    policy_id: Mapped[UUID] = mapped_column(ForeignKey("policies.id"))
    number: Mapped[int] = mapped_column(Integer)
    parent: Mapped[int | None] = mapped_column(Integer)
    update_id: Mapped[UUID | None] = mapped_column(ForeignKey("updates.id"))
    adapter_name: Mapped[str] = mapped_column(String(256), unique=True)
    path: Mapped[str] = mapped_column(Text, unique=True)
    sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), default=VersionStatus.CANDIDATE)
    pinned: Mapped[bool] = mapped_column(Boolean, default=False)
    probe: Mapped[list[Any] | None]
    """Per probe position the learner's top 20 at T=1: [[token, log-prob], ...]; for v0 set with the first batch."""
    deploy_attempts: Mapped[int] = mapped_column(Integer, default=0)
    next_deploy_at: Mapped[datetime | None]
    live_at: Mapped[datetime | None]
    """When it first became the served version."""
    files_deleted_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = created_column()
