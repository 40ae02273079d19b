"""What can be served now: for /readyz."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db.models import Deployment, Policy, PolicyVersion, Replica
from app.rollouts.states import DeploymentState


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
