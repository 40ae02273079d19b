"""The life of a claimed update: its lease is renewed, and it ends in one transaction, committed or failed."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db.models import Policy, Rollout, Update
from app.db.repositories.events import add_event
from app.db.repositories.feedback import has_environment_error
from app.db.repositories.policies import lock_policy
from app.db.repositories.rollouts import lock_rollouts
from app.db.repositories.updates import extend_lease, lock_expired_updates, lock_running_update, update_rollouts
from app.db.repositories.versions import NewVersion, append_version, get_version
from app.db.types import clock
from app.rollouts.groups import first_half
from app.rollouts.lifecycle import transition
from app.rollouts.rewards import count_late_feedback
from app.rollouts.states import RolloutState, SkipReason, UpdateState

TRIES_ALONE = 3
"""How often a rollout is trained alone before it is skipped(update_failed)."""


class LeaseLost(Exception):
    """The update is no longer this owner's: another learner may have its rollouts. Nothing was written."""


@dataclass(frozen=True)
class RolloutSummary:
    """What an update did with one rollout."""

    action_tokens: int
    advantage_mean: float
    advantage_std: float
    masked_share: float
    """Share of its action tokens that the clip (DIS) rejected, mean over the policy steps."""
    residual: float | None = None
    """Its return minus what the critic expected at its first action token, before it had seen it; None: no critic."""


@dataclass(frozen=True)
class UpdateDone:
    """What a finished update commits. Its files are in place already."""

    version: NewVersion | None
    """None: only the critic learned."""
    health: dict[str, Any]
    """Finite numbers and nulls: JSON has no NaN."""
    seconds: dict[str, Any]
    provenance: dict[str, Any]
    summaries: dict[UUID, RolloutSummary] = field(default_factory=dict)
    """By rollout."""
    probes: list[list[int]] | None = None
    """Canary prompts (token ids), given when this batch fixes them."""
    probe_zero: list[Any] | None = None
    """Version 0's probe, given with `probes`."""


def renew_lease(session: Session, update_id: UUID, owner: str, ttl_s: float = 30.0) -> bool:
    """Extend the lease from now. False: it is lost, and the work is to be dropped."""
    return extend_lease(session, update_id, owner, clock(session) + timedelta(seconds=ttl_s))


def commit_update(session: Session, update_id: UUID, owner: str, done: UpdateDone) -> int | None:
    """Make the update's work count: new version and head, rollouts trained, update done, all in one transaction.

    A lease that has run out still commits as long as nobody has taken it away: taking it sets the row to `failed`
    under the same lock, so the two exclude each other, and finished work is not thrown away for a late heartbeat.

    Returns:
        The new version's number; None after an update without one.

    Raises:
        LeaseLost: the update was failed meanwhile, belongs to another owner, or the head has moved under it.
    """
    found = session.get(Update, update_id)
    if found is None:
        raise LeaseLost(f"there is no update {update_id}")
    policy = lock_policy(session, found.policy_id)
    update = _own(session, update_id, owner)
    if policy.head != update.base_version:
        raise LeaseLost(f"the head moved from version {update.base_version} to {policy.head} during update {update_id}")
    now = clock(session)
    if done.version is not None:
        version = append_version(session, policy.id, done.version, parent=update.base_version, update_id=update.id)
        policy.head = update.version = version.number
    _mark_trained(session, update, done)
    _fix_probes(session, policy, done)
    policy.checkpoint_update_id = update.id
    policy.updates_done += 1
    policy.learner_seen_at = now
    update.state = UpdateState.DONE
    update.health, update.seconds, update.provenance = done.health, done.seconds, done.provenance
    update.ended_at = now
    session.flush()
    return update.version


def fail_update(session: Session, update_id: UUID, owner: str, error: str, *, blame_rollouts: bool = True) -> None:
    """Give the update's rollouts back, to be claimed again in halves; what was rewarded meanwhile counts after all.

    Args:
        blame_rollouts: False where the machine failed (a full disk, say): the rollouts go back as they came.

    Raises:
        LeaseLost: the update is not running, or another owner's.
    """
    _fail(session, _own(session, update_id, owner), error, clock(session), blame_rollouts)


def expire_leases(session: Session, policy_id: UUID | None = None) -> int:
    """Fail the updates (of one policy, or of all) whose lease has run out by the database's clock; returns how many."""
    now = clock(session)
    expired = lock_expired_updates(session, now, policy_id)
    for update in expired:
        _fail(session, update, f"the lease of {update.owner} ran out at {update.lease_until.isoformat()}", now)
    return len(expired)


def _own(session: Session, update_id: UUID, owner: str) -> Update:
    update = lock_running_update(session, update_id, owner)
    if update is None:
        raise LeaseLost(f"update {update_id} is not running under {owner} (any more)")
    return update


def _mark_trained(session: Session, update: Update, done: UpdateDone) -> None:
    rows = update_rollouts(session, update.id)
    unknown = set(done.summaries) - {row.rollout_id for row in rows}
    if unknown:
        raise ValueError(f"update {update.id} has summaries of rollouts that it did not claim: {sorted(unknown)}")
    for row in rows:
        summary = done.summaries.get(row.rollout_id)
        if summary is not None:
            row.action_tokens = summary.action_tokens
            row.advantage_mean = summary.advantage_mean
            row.advantage_std = summary.advantage_std
            row.masked_share = summary.masked_share
            row.residual = summary.residual
    for rollout in lock_rollouts(session, [row.rollout_id for row in rows]):
        transition(rollout, RolloutState.TRAINED)
        rollout.retry_group = None


def _fix_probes(session: Session, policy: Policy, done: UpdateDone) -> None:
    if done.probes is None:
        return
    policy.probes = done.probes
    zero = get_version(session, policy.id, 0)
    if zero is not None:
        zero.probe = done.probe_zero


def _fail(session: Session, update: Update, error: str, now: datetime, blame_rollouts: bool = True) -> None:
    rows = update_rollouts(session, update.id)
    rollouts = {rollout.id: rollout for rollout in lock_rollouts(session, [row.rollout_id for row in rows])}
    retried_first = first_half(
        [rollouts[row.rollout_id] for row in rows], whole_groups=update.settings.get("advantage") == "group"
    )
    groups = (uuid7(), uuid7())
    for rollout in rollouts.values():
        count_late_feedback(session, rollout)
        rollout.update_id = None
        if blame_rollouts:
            rollout.failed_alone += len(rows) == 1
        group = groups[rollout.id not in retried_first]
        _send_back(session, rollout, group if blame_rollouts else rollout.retry_group)
    update.state = UpdateState.FAILED
    update.error = error
    update.ended_at = now
    add_event(
        session,
        "update_failed",
        _what_failed(error, len(rows), blame_rollouts),
        policy_id=update.policy_id,
        data={"update_id": str(update.id), "owner": update.owner},
    )


def _what_failed(error: str, rollouts: int, blame_rollouts: bool) -> str:
    if rollouts == 0:  # it claims none
        return f"A value pretraining failed ({error}); the critic and all rollouts are as they were."
    how = "tried again in smaller groups" if blame_rollouts else "claimed again as they were"
    return f"An update failed ({error}); its {rollouts} rollouts are {how}."


def _send_back(session: Session, rollout: Rollout, group: UUID | None) -> None:
    if has_environment_error(session, rollout.id):
        transition(rollout, RolloutState.SKIPPED, SkipReason.ENVIRONMENT_ERROR)
    elif rollout.failed_alone >= TRIES_ALONE:
        transition(rollout, RolloutState.SKIPPED, SkipReason.UPDATE_FAILED)
    else:
        transition(rollout, RolloutState.READY)
        rollout.retry_group = group
        return
    rollout.retry_group = None
