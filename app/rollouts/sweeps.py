"""What nobody asks for is swept: orphaned interactions, idle rollouts, rollouts that have become too old."""

from datetime import timedelta

from sqlalchemy.orm import Session

from app.db.repositories.policies import list_policies
from app.db.repositories.rollouts import (
    idle_rollouts,
    lock_rollouts,
    overdue_interactions,
    ready_rollouts_outside,
)
from app.db.repositories.versions import parent_chain
from app.db.types import clock
from app.policies.learning import stored_max_staleness
from app.rollouts.lifecycle import abort_interaction, settle
from app.rollouts.picking import skip_too_old
from app.rollouts.states import RolloutState

PER_CALL = 500
"""Rows one call looks at: a sweep never holds its locks for long, and the next tick goes on."""


def sweep_orphans(session: Session, older_than_s: float) -> int:
    """Abort interactions that have been running longer than any request may; returns how many."""
    before = clock(session) - timedelta(seconds=older_than_s)
    overdue = overdue_interactions(session, before, PER_CALL)
    locked = {rollout.id for rollout in lock_rollouts(session, [r for _, r in overdue], skip_locked=True)}
    mine = [interaction_id for interaction_id, rollout_id in overdue if rollout_id in locked]
    for interaction_id in mine:
        abort_interaction(session, interaction_id, f"it ran longer than {older_than_s:g} s, or its server died")
    return len(mine)


def sweep_idle(session: Session, with_reward_s: float, without_reward_s: float) -> int:
    """Close open rollouts in which nothing runs and nothing has happened for too long; returns how many."""
    now = clock(session)
    swept = 0
    for rewarded, idle_s in ((True, with_reward_s), (False, without_reward_s)):
        before = now - timedelta(seconds=idle_s)
        ids = idle_rollouts(session, before, rewarded=rewarded, limit=PER_CALL)
        for rollout in lock_rollouts(session, ids, skip_locked=True):
            # it may have moved on before it was locked
            if rollout.state == RolloutState.OPEN and rollout.active_at < before:
                rollout.closing = True
                settle(session, rollout, now)
                swept += 1
    session.flush()
    return swept


def sweep_stale(session: Session) -> int:
    """Skip ready rollouts whose oldest sample is too far behind the head, or off its lineage; returns how many."""
    swept = 0
    for policy in list_policies(session):
        limit = stored_max_staleness(policy.settings)
        if policy.head is None or limit is None:
            continue
        young = parent_chain(session, policy.id, policy.head, max_steps=limit)
        ids = ready_rollouts_outside(session, policy.id, list(young), PER_CALL)
        ready = [r for r in lock_rollouts(session, ids, skip_locked=True) if r.state == RolloutState.READY]
        swept += len(ready) - len(skip_too_old(session, policy, limit, ready))
    session.flush()
    return swept
