from datetime import datetime
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    JSON,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.db.models.base import Base, created_column, id_column
from app.rollouts.states import InteractionState, RolloutState


class Rollout(Base):
    """One episode: one or more interactions."""

    __tablename__ = "rollouts"
    __table_args__ = (
        UniqueConstraint("key_id", "policy_id", "client_id"),
        Index("ix_rollouts_policy_state", "policy_id", "state", "ready_at"),
        Index("ix_rollouts_policy_state_id", "policy_id", "state", "id"),
        Index("ix_rollouts_policy_ready", "policy_id", "ready_at"),
        Index("ix_rollouts_update", "update_id"),
        Index("ix_rollouts_client", "client_id"),
        Index(
            "ix_rollouts_open",
            "active_at",
            sqlite_where=text("state = 'open'"),
            postgresql_where=text("state = 'open'"),
        ),
        Index(
            "ix_rollouts_skipped",
            "policy_id",
            "reason",
            sqlite_where=text("state = 'skipped'"),
            postgresql_where=text("state = 'skipped'"),
        ),
    )

    id: Mapped[UUID] = id_column()
    policy_id: Mapped[UUID] = mapped_column(ForeignKey("policies.id"))
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    client_id: Mapped[str | None] = mapped_column(String(128))
    """The caller's own name for it; None: a one-call rollout."""
    tags: Mapped[dict[str, Any]] = mapped_column(JSON(), default=dict)
    state: Mapped[str] = mapped_column(String(16), default=RolloutState.OPEN)
    reason: Mapped[str | None] = mapped_column(String(32))
    total_return: Mapped[float | None] = mapped_column(Float)
    """Sum of the rewards that are applied now (its turns' and its own); None without one. Kept with the feedback rows,
    under the rollout's lock, so that sweeps and pages need not add them up."""
    closing: Mapped[bool] = mapped_column(Boolean, default=False)
    """A final reward or a close has come; it leaves `open` when its last running interaction ends."""
    opened_at: Mapped[datetime] = created_column()
    active_at: Mapped[datetime] = created_column()
    """Last interaction or reward: idle time counts from here."""
    closed_at: Mapped[datetime | None]
    ready_at: Mapped[datetime | None]
    update_id: Mapped[UUID | None] = mapped_column(ForeignKey("updates.id"))
    """The update that trains or trained it."""
    retry_group: Mapped[UUID | None]
    """After a failed update its rollouts are claimed again in halves: the rollouts of one group, alone."""
    failed_alone: Mapped[int] = mapped_column(Integer, default=0)


class Interaction(Base):
    """One request and its completion."""

    __tablename__ = "interactions"
    __table_args__ = (
        Index("ix_interactions_rollout", "rollout_id", "started_at"),
        Index("ix_interactions_policy_state", "policy_id", "state", "reason"),
        Index("ix_interactions_policy_version", "policy_id", "version", "ended_at"),
        Index(
            "ix_interactions_running",
            "started_at",
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
    )

    id: Mapped[UUID] = id_column()
    policy_id: Mapped[UUID] = mapped_column(ForeignKey("policies.id"))
    """Its rollout's policy, repeated here so that counting needs no join."""
    rollout_id: Mapped[UUID] = mapped_column(ForeignKey("rollouts.id"))
    parent_id: Mapped[UUID | None] = mapped_column(ForeignKey("interactions.id"))
    version: Mapped[int] = mapped_column(Integer)
    """Number of the policy version that sampled it; of the oldest, where several did (see version_runs)."""
    version_runs: Mapped[list[Any] | None]
    """[[version, tokens], ...] in the order of the tokens, where weights were swapped under it; None: all by one."""
    new_prompt_ids: Mapped[npt.NDArray[np.int32]]
    """The prompt ids after the parent's last token; for a root, the whole prompt."""
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    """Length of the whole prompt."""
    completion_ids: Mapped[npt.NDArray[np.int32] | None]
    logprobs: Mapped[npt.NDArray[np.float32] | None]
    """Behaviour log-probs: natural logs at `temperature`, one per completion id."""
    temperature: Mapped[float] = mapped_column(Float)
    sampling: Mapped[dict[str, Any]]
    """The sampling parameters as sent to the engine."""
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16), default=InteractionState.RUNNING)
    reason: Mapped[str | None] = mapped_column(String(32))
    """Why it is not trained (SkipReason); None: trainable."""
    detail: Mapped[str | None] = mapped_column(Text)
    """The reason in words, for whoever asks."""
    request: Mapped[bytes | None] = mapped_column(LargeBinary)
    response: Mapped[bytes | None] = mapped_column(LargeBinary)
    replica: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime] = created_column()
    first_token_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
