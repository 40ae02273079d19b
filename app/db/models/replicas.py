from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import JSON, Boolean, Float, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column
from app.rollouts.states import DeploymentState


class Replica(Base):
    """One running engine."""

    __tablename__ = "replicas"

    id: Mapped[UUID] = id_column()
    url: Mapped[str] = mapped_column(Text, unique=True)
    healthy: Mapped[bool] = mapped_column(Boolean, default=False)
    error: Mapped[str | None] = mapped_column(Text)
    seen_at: Mapped[datetime | None]
    base_model: Mapped[str | None] = mapped_column(Text)
    """The base model that it serves, as it last said itself: a directory or a hub name."""
    weights: Mapped[str | None] = mapped_column(Text)
    """For a policy that trains all weights: the label of those that it serves, as it last said itself (a version's
    adapter name, or "default" since its start)."""
    swap_began_at: Mapped[datetime | None]
    """Set while its weights are swapped: nothing new is sent there, and requests wait for the end."""
    noise: Mapped[list[Any]] = mapped_column(JSON(), default=list)
    """Recent engine-against-learner noise figures of the canary, newest last."""
    removed: Mapped[bool] = mapped_column(Boolean, default=False)
    """No longer in EVERGREEN_ENGINE_URLS."""
    owner: Mapped[str | None] = mapped_column(String(128))
    """The process whose deploy tick is at work on it; nobody else's is until `owned_until`."""
    owned_until: Mapped[datetime | None]


class Deployment(Base):
    """What a replica has loaded, and its canary's figures."""

    __tablename__ = "deployments"
    __table_args__ = (UniqueConstraint("replica_id", "version_id"), Index("ix_deployments_version", "version_id"))

    id: Mapped[UUID] = id_column()
    replica_id: Mapped[UUID] = mapped_column(ForeignKey("replicas.id"))
    version_id: Mapped[UUID] = mapped_column(ForeignKey("policy_versions.id"))
    state: Mapped[str] = mapped_column(String(16), default=DeploymentState.LOADING)
    verdict: Mapped[str | None] = mapped_column(String(24))
    """verified | indistinguishable | unchecked | failed."""
    score: Mapped[float | None] = mapped_column(Float)
    """<e, d> / <d, d>."""
    distance: Mapped[float | None] = mapped_column(Float)
    """|d|, nats."""
    paused_ms: Mapped[float | None] = mapped_column(Float)
    """All weights: how long the engine stood still for it. None for an adapter, which stops nobody."""
    closed_ms: Mapped[float | None] = mapped_column(Float)
    """All weights: how long new requests waited for it, the canary included."""
    error: Mapped[str | None] = mapped_column(Text)
    loaded_at: Mapped[datetime | None]
    updated_at: Mapped[datetime] = created_column()
