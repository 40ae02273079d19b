"""Rows of updates: the running one is its policy's lease."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, literal, select
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session, defer

from app.db.models import Interaction, PolicyVersion, Rollout, Update, UpdateRollout
from app.db.repositories.rollouts import in_state
from app.rollouts.states import RolloutState, UpdateState

_RUNNING = Update.state == literal(str(UpdateState.RUNNING), literal_execute=True)


def running_update(session: Session, policy_id: UUID) -> Update | None:
    return session.scalar(select(Update).where(Update.policy_id == policy_id, _RUNNING))


def lock_running_update(session: Session, update_id: UUID, owner: str) -> Update | None:
    """The owner's running update, locked; None: it is not running, or not this owner's (any more)."""
    return session.scalar(
        select(Update)
        .where(Update.id == update_id, Update.owner == owner, _RUNNING)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    )


def lock_expired_updates(session: Session, now: datetime, policy_id: UUID | None = None) -> list[Update]:
    """Running updates whose lease has ended, locked; those that somebody else holds are left to them."""
    query = select(Update).where(_RUNNING, Update.lease_until < now)
    if policy_id is not None:
        query = query.where(Update.policy_id == policy_id)
    return list(
        session.scalars(
            query.order_by(Update.id)
            .with_for_update(key_share=True, skip_locked=True)
            .execution_options(populate_existing=True)
        )
    )


def extend_lease(session: Session, update_id: UUID, owner: str, until: datetime) -> bool:
    renewed = session.execute(
        sql_update(Update)
        .where(Update.id == update_id, Update.owner == owner, _RUNNING)
        .values(lease_until=until)
        .returning(Update.id)
    )
    return renewed.first() is not None


def update_rollouts(session: Session, update_id: UUID) -> list[UpdateRollout]:
    """In the order of their position."""
    return list(
        session.scalars(
            select(UpdateRollout).where(UpdateRollout.update_id == update_id).order_by(UpdateRollout.position)
        )
    )


def pretraining_epochs(update: Update) -> int | None:
    """Of a done value pretraining; None: it is another update."""
    health = update.health or {}
    return int(health["epochs"]) if health.get("kind") == "value_pretraining" else None


def count_ready(session: Session, policy_id: UUID) -> tuple[int, datetime | None]:
    """How many rollouts wait for an ordinary batch, and since when the oldest does."""
    row = session.execute(
        select(func.count(), func.min(Rollout.ready_at)).where(*_ready(policy_id), Rollout.retry_group.is_(None))
    ).one()
    return row[0], row[1]


def ready_tags(session: Session, policy_id: UUID) -> list[Any]:
    """(id, key_id, tags, ready_at) of the rollouts that wait for an ordinary batch, the newest first."""
    return list(
        session.execute(
            select(Rollout.id, Rollout.key_id, Rollout.tags, Rollout.ready_at)
            .where(*_ready(policy_id), Rollout.retry_group.is_(None))
            .order_by(Rollout.ready_at.desc(), Rollout.id.desc())
        )
    )


def open_tags(session: Session, policy_id: UUID) -> list[Any]:
    """(key_id, tags) of the open rollouts."""
    return list(
        session.execute(
            select(Rollout.key_id, Rollout.tags).where(
                Rollout.policy_id == policy_id, in_state(Rollout.state, RolloutState.OPEN)
            )
        )
    )


def oldest_retry_group(session: Session, policy_id: UUID) -> UUID | None:
    """The retry group that has waited longest."""
    return session.scalar(
        select(Rollout.retry_group)
        .where(*_ready(policy_id), Rollout.retry_group.is_not(None))
        .order_by(Rollout.ready_at, Rollout.retry_group)
        .limit(1)
    )


def lock_ready_rollouts(
    session: Session, policy_id: UUID, retry_group: UUID | None, limit: int, leave_out: list[UUID]
) -> list[Rollout]:
    """The newest ready rollouts of a retry group (None: of none), locked; those that are locked already are passed."""
    return list(
        session.scalars(
            select(Rollout)
            .where(
                *_ready(policy_id),
                Rollout.retry_group.is_(None) if retry_group is None else Rollout.retry_group == retry_group,
                Rollout.id.not_in(leave_out),
            )
            .order_by(Rollout.ready_at.desc(), Rollout.id.desc())
            .limit(limit)
            .with_for_update(key_share=True, skip_locked=True)
            .execution_options(populate_existing=True)
        )
    )


def whole_interactions(session: Session, rollout_ids: list[UUID]) -> dict[UUID, list[Interaction]]:
    """rollout id -> its interactions with their tokens, in the order of their start, a parent before its children."""
    found: dict[UUID, list[Interaction]] = {rollout_id: [] for rollout_id in rollout_ids}
    rows = session.scalars(
        select(Interaction)
        .options(defer(Interaction.request, raiseload=True), defer(Interaction.response, raiseload=True))
        .where(Interaction.rollout_id.in_(rollout_ids))
        .order_by(Interaction.started_at, Interaction.id)
    )
    for interaction in rows:
        found[interaction.rollout_id].append(interaction)
    return found


def version_status(session: Session, policy_id: UUID, number: int) -> str | None:
    return session.scalar(
        select(PolicyVersion.status).where(PolicyVersion.policy_id == policy_id, PolicyVersion.number == number)
    )


def _ready(policy_id: UUID) -> tuple[Any, ...]:
    return Rollout.policy_id == policy_id, in_state(Rollout.state, RolloutState.READY)
