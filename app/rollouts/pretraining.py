"""The claim of a value pretraining: the policy's lease, and its logged history instead of a batch."""

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import Policy, Rollout
from app.db.repositories.policies import lock_policy
from app.db.repositories.updates import running_update
from app.db.types import clock
from app.rollouts.claimed import Claim
from app.rollouts.learning import Idle, settings_invalid, snapshot, take_lease
from app.rollouts.leases import expire_leases
from app.rollouts.states import RolloutState

HISTORY_ROLLOUTS = 4096
"""The newest so many are read at once."""


def claim_pretraining(session: Session, policy_id: UUID, *, owner: str, ttl_s: float = 30.0) -> Claim | Idle:
    """Take the policy's lease, as an update does, but no rollouts: `with_history` adds them. None changes its state.

    It needs no learning switched on and no head that engines accept: the policy does not move.
    """
    policy = lock_policy(session, policy_id)
    expire_leases(session, policy_id)
    if policy.head is None:
        return Idle("preparing: version 0 is not written yet")
    if (reason := settings_invalid(policy)) is not None:
        return Idle(reason)
    if (running := running_update(session, policy.id)) is not None:
        return Idle(f"update_running: {running.id} by {running.owner}")
    return take_lease(session, policy, [], owner, clock(session) + timedelta(seconds=ttl_s))


def has_history(session: Session, policy_id: UUID) -> bool:
    return bool(_history(session, policy_id, 1))


def with_history(session: Session, claim: Claim) -> Claim:
    """The claim with the newest trained and ready rollouts, at most HISTORY_ROLLOUTS, and the rewards that count."""
    policy = session.get_one(Policy, claim.policy_id)
    history = _history(session, policy.id, HISTORY_ROLLOUTS)
    return replace(claim, rollouts=tuple(snapshot(session, policy.id, policy.head or 0, history)))


def _history(session: Session, policy_id: UUID, limit: int) -> list[Rollout]:
    return list(
        session.scalars(
            select(Rollout)
            .where(Rollout.policy_id == policy_id, Rollout.state.in_([RolloutState.TRAINED, RolloutState.READY]))
            .order_by(Rollout.ready_at.desc(), Rollout.id.desc())
            .limit(limit)
        )
    )
