"""Which ready rollouts a batch is made of: the newest first, without those that have become too old on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from app.db.models import Policy, Rollout
from app.db.repositories.rollouts import interaction_outcomes
from app.db.repositories.updates import lock_ready_rollouts
from app.db.repositories.versions import parent_chain
from app.policies.learning import LearningSettings
from app.rollouts.lifecycle import transition
from app.rollouts.provenance import sampled_versions
from app.rollouts.states import InteractionState, RolloutState
from app.rollouts.trainability import too_old

PICKING_ROUNDS = 16
"""Bounds one claim's work on rollouts that turn out too old; the next tick, or the sweep, goes on."""


@dataclass(frozen=True)
class Picked:
    rollout: Rollout
    staleness: int
    """Of its oldest trainable interaction."""


def pick_rollouts(
    session: Session, policy: Policy, settings: LearningSettings, retry_group: UUID | None
) -> list[Picked]:
    """Lock the newest ready rollouts and skip the too old among them, until the batch is full or nothing is left."""
    picked: list[Picked] = []
    for _ in range(PICKING_ROUNDS):
        wanted = settings.rollouts_per_update - len(picked)
        taken = [p.rollout.id for p in picked]
        candidates = lock_ready_rollouts(session, policy.id, retry_group, wanted, leave_out=taken) if wanted else []
        if not candidates:
            break
        picked += skip_too_old(session, policy, settings.max_staleness, candidates)
        session.flush()
    return picked


def skip_too_old(
    session: Session, policy: Policy, max_staleness: int | None, candidates: Sequence[Rollout]
) -> list[Picked]:
    """Skip those of the locked, ready rollouts that cannot be trained at this head any more; return the others."""
    versions = {
        rollout_id: [
            version
            for row in rows
            if row.state == InteractionState.COMPLETED and row.reason is None
            for version in sampled_versions(row.version, row.version_runs)
        ]
        for rollout_id, rows in interaction_outcomes(session, [r.id for r in candidates]).items()
    }
    oldest = min((version for found in versions.values() for version in found), default=0)
    chain = parent_chain(session, policy.id, policy.head or 0, back_to=oldest)
    young: list[Picked] = []
    for rollout in candidates:
        reason = too_old(versions[rollout.id], chain, max_staleness)
        if reason is None:
            young.append(Picked(rollout, max(chain[version] for version in versions[rollout.id])))
        else:
            transition(rollout, RolloutState.SKIPPED, reason)
            rollout.retry_group = None
    return young
