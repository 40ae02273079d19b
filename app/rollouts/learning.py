"""The claim: which rollouts the learner trains next, or why it trains none."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import numpy as np
from pydantic import ValidationError
from sqlalchemy.orm import Session

from app.db.models import Interaction, Policy, Rollout, Update, UpdateRollout
from app.db.repositories.feedback import applied_rewards
from app.db.repositories.policies import lock_policy
from app.db.repositories.updates import (
    count_ready,
    oldest_retry_group,
    pretraining_epochs,
    running_update,
    whole_interactions,
)
from app.db.repositories.versions import NewVersion, get_version, parent_chain
from app.db.types import clock
from app.policies.learning import LearningSettings, as_training
from app.rollouts.claimed import Claim, ClaimedInteraction, ClaimedRollout, VersionRef
from app.rollouts.groups import ReadyGroups, group_of, pick_groups, ready_groups
from app.rollouts.leases import (
    LeaseLost,
    RolloutSummary,
    UpdateDone,
    commit_update,
    expire_leases,
    fail_update,
    renew_lease,
)
from app.rollouts.lifecycle import transition
from app.rollouts.picking import Picked, pick_rollouts
from app.rollouts.states import RolloutState, SkipReason, VersionStatus

__all__ = [
    "Idle",
    "LeaseLost",
    "NewVersion",
    "RolloutSummary",
    "UpdateDone",
    "claim_update",
    "commit_update",
    "expire_leases",
    "fail_update",
    "note_idle",
    "renew_lease",
    "snapshot",
]

SEEN_EVERY = timedelta(seconds=5)
"""How often an idle learner's sign of life is written."""


@dataclass(frozen=True)
class Idle:
    """Why no update starts, in words for an operator; it begins with one word for programs."""

    reason: str


def claim_update(session: Session, policy_id: UUID, *, owner: str, ttl_s: float = 30.0) -> Claim | Idle:
    """Take the policy's lease and its next batch, in the caller's transaction.

    The newest ready rollouts come first, at most `rollouts_per_update`; those of a failed update before all others and
    alone. With `advantage: group` they come in groups (app/rollouts/groups.py). Rollouts that turn out too old are
    skipped on the way. Returns are snapshots: a reward that comes later is late. An expired lease is failed first, so
    that a dead learner blocks nobody.

    Args:
        owner: unique per learner process.
        ttl_s: seconds until the lease ends unless it is renewed.
    """
    policy = lock_policy(session, policy_id)
    now = clock(session)
    expire_leases(session, policy_id)
    reason = _why_idle(session, policy)
    running = running_update(session, policy.id)
    if reason is None and running is not None:
        # the policy is being trained: that is no reason of its own to be idle, so the row keeps what it says
        return Idle(f"update_running: {running.id} by {running.owner}")
    if reason is None:
        settings = LearningSettings.model_validate(policy.settings)
        picked = _pick_batch(session, policy, settings, now)
        if not isinstance(picked, Idle):
            _note(policy, now, None)
            return take_lease(session, policy, picked, owner, now + timedelta(seconds=ttl_s))
        reason = picked.reason
    _note(policy, now, reason)
    session.flush()
    return Idle(reason)


def _why_idle(session: Session, policy: Policy) -> str | None:
    if policy.head is None:
        return "preparing: version 0 is not written yet"
    if not policy.learning:
        return "learning_off: switched off by an operator"
    head = get_version(session, policy.id, policy.head)
    if head is not None and head.status == VersionStatus.REJECTED:
        again = f"POST /admin/policies/{policy.name}/versions/{policy.head}/retry"
        return f"deploy_failing: version {policy.head} was rejected; see /admin/events for why, then {again}"
    return settings_invalid(policy)


def settings_invalid(policy: Policy) -> str | None:
    """Why nothing can learn with the policy's stored settings; None: it can."""
    try:
        LearningSettings.model_validate(policy.settings)
    except ValidationError as error:
        # stored before there was a rule against them: no rollout is to blame
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        return f"settings_invalid: {setting}: {first['msg']}; change it with PATCH /admin/policies/{policy.name}"
    return None


def note_idle(session: Session, policy_id: UUID, reason: str) -> None:
    """Say why a learner leaves the policy alone; its next claim says anew how things stand. Locks the policy."""
    _note(lock_policy(session, policy_id), clock(session), reason)


def _note(policy: Policy, now: datetime, reason: str | None) -> None:
    """Leave a sign of life and the reason, without a write at every tick."""
    if policy.idle_reason != reason:
        policy.idle_reason = reason
        policy.learner_seen_at = now
    elif policy.learner_seen_at is None or now - policy.learner_seen_at >= SEEN_EVERY:
        policy.learner_seen_at = now


def _pick_batch(session: Session, policy: Policy, settings: LearningSettings, now: datetime) -> list[Picked] | Idle:
    retry = oldest_retry_group(session, policy.id)
    if retry is not None:
        picked = pick_rollouts(session, policy, settings, retry)
        return picked or Idle("too_few_rollouts: those of a failed update are too old, or being written to")
    groups = ready_groups(session, policy, settings, now) if settings.advantage == "group" else None
    ready, oldest = count_ready(session, policy.id) if groups is None else (groups.rollouts, groups.oldest_at)
    waited_s = (now - oldest).total_seconds() if oldest is not None else 0.0
    needed = settings.min_rollouts
    if waited_s >= settings.max_wait_s:
        needed = min(needed, settings.min_rollouts_after_wait)
    if ready < needed:
        return _too_few(ready, settings, groups)
    if groups is None:
        picked, full = pick_rollouts(session, policy, settings, None), settings.rollouts_per_update
    else:
        picked = pick_groups(session, policy, settings, groups.groups)
        full = settings.rollouts_per_update - settings.group_size + 1  # the next group may not fit any more
    return picked if len(picked) >= min(needed, full) else _too_few(len(picked), settings, groups)


def _too_few(ready: int, settings: LearningSettings, groups: ReadyGroups | None) -> Idle:
    reason = (
        f"too_few_rollouts: {ready} ready, {settings.min_rollouts} needed "
        f"({settings.min_rollouts_after_wait} once the oldest has waited {settings.max_wait_s:g} s)"
    )
    if groups is not None:
        reason += (
            f", in groups of {settings.group_size}; {groups.incomplete} more wait for the rest of their group, "
            f"{groups.ungrouped} have no tag 'group' and are not trained while advantage is group"
        )
    return Idle(reason)


def take_lease(session: Session, policy: Policy, picked: Sequence[Picked], owner: str, until: datetime) -> Claim:
    """A running update of the locked policy, with its rollouts."""
    head = get_version(session, policy.id, policy.head or 0)
    if head is None:
        raise LookupError(f"policy {policy.name}: its head {policy.head} has no row")
    update = Update(
        policy_id=policy.id, owner=owner, lease_until=until, base_version=head.number, settings=policy.settings
    )
    session.add(update)
    session.flush()
    claimed = snapshot(session, policy.id, head.number, [pick.rollout for pick in picked])
    for position, (pick, rollout) in enumerate(zip(picked, claimed, strict=True)):
        transition(pick.rollout, RolloutState.TRAINING)
        pick.rollout.update_id = update.id
        session.add(
            UpdateRollout(
                update_id=update.id,
                rollout_id=rollout.id,
                position=position,
                total_return=rollout.total_return,
                staleness=pick.staleness,
            )
        )
    session.flush()
    return Claim(
        update_id=update.id,
        policy_id=policy.id,
        policy_name=policy.name,
        base_model=policy.base_model,
        settings=dict(policy.settings),
        training=as_training(policy.training),
        head=VersionRef(head.number, head.path, head.sha256, head.adapter_name),
        checkpoint_update_id=policy.checkpoint_update_id,
        updates_done=policy.updates_done,
        pretrainings=_pretrainings(session, policy),
        reward_min=policy.reward_min,
        reward_max=policy.reward_max,
        rollouts=tuple(claimed),
        probes=None if policy.probes is None else tuple(tuple(probe) for probe in policy.probes),
    )


def _pretrainings(session: Session, policy: Policy) -> int:
    """Among the policy's done updates. Each update's provenance counts those before it, so that a replay knows too."""
    last = session.get(Update, policy.checkpoint_update_id) if policy.checkpoint_update_id else None
    if last is None or last.provenance is None:
        return 0
    before: int = last.provenance.get("pretrainings", 0)
    return before + (pretraining_epochs(last) is not None)


def snapshot(session: Session, policy_id: UUID, head: int, rollouts: Sequence[Rollout]) -> list[ClaimedRollout]:
    """The rollouts with their tokens and the rewards that count now, in their order; ages count to `head`."""
    ids = [rollout.id for rollout in rollouts]
    interactions = whole_interactions(session, ids)
    oldest = min((interaction.version for found in interactions.values() for interaction in found), default=0)
    chain = parent_chain(session, policy_id, head, back_to=oldest)
    rewards = {(row.rollout_id, row.interaction_id): row.value for row in applied_rewards(session, ids)}
    return [
        ClaimedRollout(
            id=rollout.id,
            interactions=tuple(
                _claimed(interaction, chain, head, rewards.get((rollout.id, interaction.id)))
                for interaction in interactions[rollout.id]
            ),
            final_reward=rewards.get((rollout.id, None)),
            group=group_of(rollout.key_id, rollout.tags),
        )
        for rollout in rollouts
    ]


def _claimed(interaction: Interaction, chain: dict[int, int], head: int, reward: float | None) -> ClaimedInteraction:
    reason = SkipReason(interaction.reason) if interaction.reason else None
    # one that still runs began after the close and carries that reason
    return ClaimedInteraction(
        id=interaction.id,
        parent_id=interaction.parent_id,
        version=interaction.version,
        # context off the parent chain has no count of steps; nothing is trained with it
        staleness=chain.get(interaction.version, head - interaction.version),
        staleness_runs=tuple((chain.get(number, head - number), n) for number, n in interaction.version_runs or ()),
        new_prompt_ids=interaction.new_prompt_ids,
        completion_ids=np.zeros(0, np.int32) if interaction.completion_ids is None else interaction.completion_ids,
        logprobs=np.zeros(0, np.float32) if interaction.logprobs is None else interaction.logprobs,
        temperature=interaction.temperature,
        finish_reason=interaction.finish_reason or "abort",
        reward=reward,
        skip_reason=reason,
    )
