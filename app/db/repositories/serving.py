"""What can be served now: for /readyz."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db.models import Policy, Replica
from app.db.repositories.policies import list_policies
from app.db.repositories.replicas import routes
from app.db.repositories.swaps import swap_age_s


def served_policies(session: Session) -> list[str]:
    """Names of the policies that a healthy replica serves, or will once its weights have been swapped."""
    return sorted(
        policy.name
        for policy in list_policies(session)
        if policy.live is not None and (routes(session, policy.id, None) or swap_age_s(session, policy) is not None)
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
