"""Pages of rows, newest first, as operators read them. Ids are UUIDv7: their order is the order of time."""

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import Deployment, Feedback, Interaction, PolicyVersion, Replica, Rollout, Update, UpdateRollout
from app.rollouts.states import DeploymentState


@dataclass(frozen=True)
class RolloutFilter:
    """None: whatever."""

    policy_id: UUID | None = None
    state: str | None = None
    reason: str | None = None
    client_id: str | None = None
    update_id: UUID | None = None


def list_rollouts(session: Session, wanted: RolloutFilter, *, limit: int, after: UUID | None = None) -> list[Rollout]:
    """At most `limit` rollouts, those older than the rollout `after`."""
    query = select(Rollout)
    for column, value in (
        (Rollout.policy_id, wanted.policy_id),
        (Rollout.state, wanted.state),
        (Rollout.reason, wanted.reason),
        (Rollout.client_id, wanted.client_id),
        (Rollout.update_id, wanted.update_id),
    ):
        if value is not None:
            query = query.where(column == value)
    if after is not None:
        query = query.where(Rollout.id < after)
    return list(session.scalars(query.order_by(Rollout.id.desc()).limit(limit)))


def list_updates(session: Session, policy_id: UUID | None, *, limit: int, after: UUID | None = None) -> list[Update]:
    """At most `limit` updates, those older than the update `after`."""
    query = select(Update)
    if policy_id is not None:
        query = query.where(Update.policy_id == policy_id)
    if after is not None:
        query = query.where(Update.id < after)
    return list(session.scalars(query.order_by(Update.id.desc()).limit(limit)))


def feedback_of(session: Session, rollout_id: UUID) -> list[Feedback]:
    """All feedback on a rollout and its interactions, in the order of its arrival."""
    return list(
        session.scalars(
            select(Feedback).where(Feedback.rollout_id == rollout_id).order_by(Feedback.created_at, Feedback.id)
        )
    )


def full_interactions(session: Session, rollout_id: UUID) -> list[Interaction]:
    """A rollout's interactions with request and response, in the order of their start."""
    return list(
        session.scalars(
            select(Interaction)
            .where(Interaction.rollout_id == rollout_id)
            .order_by(Interaction.started_at, Interaction.id)
            .execution_options(populate_existing=True)
        )
    )


def trainings_of(session: Session, rollout_id: UUID) -> list[UpdateRollout]:
    """What each update that claimed the rollout made of it, oldest first."""
    return list(
        session.scalars(
            select(UpdateRollout).where(UpdateRollout.rollout_id == rollout_id).order_by(UpdateRollout.update_id)
        )
    )


def replicas_with_deployments(session: Session) -> list[tuple[Replica, list[tuple[Deployment, PolicyVersion]]]]:
    """Every replica, and what it has loaded or failed to load."""
    replicas = session.scalars(select(Replica).order_by(Replica.url)).all()
    rows = session.execute(
        select(Deployment, PolicyVersion)
        .join(PolicyVersion, PolicyVersion.id == Deployment.version_id)
        .where(Deployment.state != DeploymentState.UNLOADED)
        .order_by(PolicyVersion.policy_id, PolicyVersion.number.desc())
    ).all()
    return [(replica, [(d, version) for d, version in rows if d.replica_id == replica.id]) for replica in replicas]
