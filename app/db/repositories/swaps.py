"""Engines whose own weights are swapped: closed from the first step until something known is served there again."""

from datetime import timedelta
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.db.models import Deployment, Policy, PolicyVersion, Replica
from app.db.repositories.policies import lock_policy
from app.db.repositories.replicas import active_replicas, replicas_for
from app.db.types import clock
from app.rollouts.states import DeploymentState

SWAP_OVERDUE_S = 120.0
"""Swaps take seconds. One that takes longer is reported, and requests that come then do not wait for it."""


def another_is_closed(session: Session, replica_id: UUID, policy_id: UUID) -> bool:
    """Whether a process is at work on a swap on another healthy replica of the policy, which is locked: one at a time,
    so that the others serve meanwhile. A closed one that nobody can help at the moment holds up no other."""
    policy = lock_policy(session, policy_id)
    now = clock(session)
    return any(
        replica.healthy
        and replica.swap_began_at is not None
        and replica.owned_until is not None
        and replica.owned_until > now
        for replica in replicas_for(session, policy.base_model)
        if replica.id != replica_id
    )


def close_for_swap(session: Session, replica_id: UUID) -> PolicyVersion | None:
    """Send nothing new to a replica whose weights are about to be swapped; `finish_deployment` opens it again.

    Returns the version that was verified there: from now on it is not. None on one that is closed already.
    """
    replica = session.get_one(Replica, replica_id, with_for_update=True)
    if replica.swap_began_at is None:  # another try is part of the same swap: requests have waited since it began
        replica.swap_began_at = clock(session)
    verified = (Deployment.replica_id == replica_id, Deployment.state == DeploymentState.VERIFIED)
    served = session.scalar(
        select(PolicyVersion).join(Deployment, Deployment.version_id == PolicyVersion.id).where(*verified)
    )
    session.execute(
        update(Deployment).where(*verified).values(state=DeploymentState.UNLOADED, updated_at=clock(session))
    )
    return served


def note_undone(session: Session, replica_id: UUID, failed_id: UUID, put_back_id: UUID) -> None:
    """What the swap to the version that failed has cost is what its undoing has: they end together."""
    session.flush()
    rows = session.scalars(select(Deployment).where(Deployment.replica_id == replica_id))
    by_version = {row.version_id: row for row in rows}
    failed, put_back = by_version[failed_id], by_version[put_back_id]
    failed.paused_ms, failed.closed_ms = put_back.paused_ms, put_back.closed_ms


def swap_age_s(session: Session, policy: Policy) -> float | None:
    """Seconds since the newest swap of weights began that is under way on a replica of this policy; None: there is
    none. LoRA policies have none."""
    if policy.training != "full":
        return None
    began = [r.swap_began_at for r in replicas_for(session, policy.base_model) if r.healthy and r.swap_began_at]
    return (clock(session) - max(began)).total_seconds() if began else None


def overdue_swaps(session: Session) -> list[Replica]:
    """Replicas that have been closed for longer than SWAP_OVERDUE_S, dead ones too."""
    since = clock(session) - timedelta(seconds=SWAP_OVERDUE_S)
    return [r for r in active_replicas(session) if r.swap_began_at is not None and r.swap_began_at < since]


def is_swapped(session: Session, url: str, policy_id: UUID, number: int) -> bool:
    """Whether the replica's weights are being swapped, or are no longer those of this version."""
    serves = (
        select(Deployment.id)
        .join(PolicyVersion, PolicyVersion.id == Deployment.version_id)
        .join(Replica, Replica.id == Deployment.replica_id)
        .where(
            Replica.url == url,
            Replica.swap_began_at.is_(None),
            PolicyVersion.policy_id == policy_id,
            PolicyVersion.number == number,
            Deployment.state == DeploymentState.VERIFIED,
        )
    )
    return session.scalar(serves) is None
