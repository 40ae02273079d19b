"""Counts per policy: what /metrics and /readyz show."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db.models import Deployment, Policy, PolicyVersion, Replica, Rollout
from app.rollouts.states import DeploymentState


@dataclass(frozen=True)
class PolicyFigures:
    name: str
    live: int | None
    head: int | None
    learning: bool
    updates_done: int
    rollouts: dict[tuple[str, str | None], int]
    """(state, reason) -> how many."""


def policy_figures(session: Session) -> list[PolicyFigures]:
    counted = session.execute(
        select(Rollout.policy_id, Rollout.state, Rollout.reason, func.count()).group_by(
            Rollout.policy_id, Rollout.state, Rollout.reason
        )
    ).all()
    return [
        PolicyFigures(
            name=policy.name,
            live=policy.live,
            head=policy.head,
            learning=policy.learning,
            updates_done=policy.updates_done,
            rollouts={(state, reason): count for owner, state, reason, count in counted if owner == policy.id},
        )
        for policy in session.scalars(select(Policy).order_by(Policy.name))
    ]


def served_policies(session: Session) -> list[str]:
    """Names of the policies whose live version is verified on a healthy replica."""
    return list(
        session.scalars(
            select(Policy.name)
            .join(PolicyVersion, (PolicyVersion.policy_id == Policy.id) & (PolicyVersion.number == Policy.live))
            .join(Deployment, Deployment.version_id == PolicyVersion.id)
            .join(Replica, Replica.id == Deployment.replica_id)
            .where(Deployment.state == DeploymentState.VERIFIED, Replica.healthy, ~Replica.removed)
            .distinct()
            .order_by(Policy.name)
        )
    )


@dataclass(frozen=True)
class ServingCounts:
    policies: int
    live_policies: int
    healthy_replicas: int


def serving_counts(session: Session) -> ServingCounts:
    policies, live = session.execute(select(func.count(), func.count(Policy.live)).select_from(Policy)).one()
    healthy = select(func.count()).select_from(Replica).where(Replica.healthy, ~Replica.removed)
    return ServingCounts(policies, live, session.scalars(healthy).one())
