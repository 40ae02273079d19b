"""The schema. One for SQLite and PostgreSQL; migrations/ builds exactly this (a test compares them)."""

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
    Uuid,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from uuid_utils.compat import uuid7

from app.db.types import Float32Array, Int32Array, UtcDateTime, db_now
from app.rollouts.states import (
    DeploymentState,
    FeedbackStatus,
    InteractionState,
    RolloutState,
    UpdateState,
    VersionStatus,
)


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        datetime: UtcDateTime(),
        UUID: Uuid(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        npt.NDArray[np.int32]: Int32Array(),
        npt.NDArray[np.float32]: Float32Array(),
    }


def _id() -> Mapped[UUID]:
    return mapped_column(Uuid(), primary_key=True, default=uuid7)


def _created() -> Mapped[datetime]:
    return mapped_column(UtcDateTime(), default=db_now())


class Policy(Base):
    """A named learning model."""

    __tablename__ = "policies"

    id: Mapped[UUID] = _id()
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
    created_at: Mapped[datetime] = _created()


class PolicyVersion(Base):
    """Immutable weights, numbered. Version 0 is an adapter whose B is zero."""

    __tablename__ = "policy_versions"
    __table_args__ = (UniqueConstraint("policy_id", "number"),)

    id: Mapped[UUID] = _id()
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
    created_at: Mapped[datetime] = _created()


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[UUID] = _id()
    name: Mapped[str] = mapped_column(String(128))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the key, hex. The key itself is never stored."""
    prefix: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[Any]]
    policy_id: Mapped[UUID | None] = mapped_column(ForeignKey("policies.id"))
    """None: every policy."""
    created_at: Mapped[datetime] = _created()
    revoked_at: Mapped[datetime | None]


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

    id: Mapped[UUID] = _id()
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
    opened_at: Mapped[datetime] = _created()
    active_at: Mapped[datetime] = _created()
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

    id: Mapped[UUID] = _id()
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
    started_at: Mapped[datetime] = _created()
    first_token_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


class Feedback(Base):
    """Append-only. The newest value per (target, metric) replaces the older, which becomes `superseded`."""

    __tablename__ = "feedback"
    __table_args__ = (
        UniqueConstraint("key_id", "idempotency_key"),
        Index("ix_feedback_rollout", "rollout_id"),
    )

    id: Mapped[UUID] = _id()
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
    created_at: Mapped[datetime] = _created()


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

    id: Mapped[UUID] = _id()
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
    started_at: Mapped[datetime] = _created()
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


class Replica(Base):
    """One running engine."""

    __tablename__ = "replicas"

    id: Mapped[UUID] = _id()
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

    id: Mapped[UUID] = _id()
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
    updated_at: Mapped[datetime] = _created()


class Event(Base):
    """What an operator should know: failed canaries, rejected versions, lost leases, swept orphans."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_at", "at"),)

    id: Mapped[UUID] = _id()
    at: Mapped[datetime] = _created()
    kind: Mapped[str] = mapped_column(String(64))
    policy_id: Mapped[UUID | None] = mapped_column(ForeignKey("policies.id"))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(JSON(), default=dict)
