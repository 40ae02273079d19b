"""Updates as they were made, read back from the database alone: what a replay trains on."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy.orm import Session

from app.db.models import Policy, Rollout, Update
from app.db.repositories.updates import pretraining_epochs
from app.db.repositories.versions import get_version
from app.policies.learning import LearningSettings, as_training
from app.rollouts.claimed import Claim, ClaimedRollout, VersionRef
from app.rollouts.learning import snapshot

NEEDED = ("checkpoint", "dtype", "returns", "reward_range", "rollouts", "threads")
"""What a replay reads of an update's provenance."""


class NotRecorded(LookupError):
    """The database does not hold what the update was trained on; the message names what is missing."""


@dataclass(frozen=True)
class RecordedUpdate:
    claim: Claim
    """As the learner had it."""
    made: VersionRef | None
    """The version that it made; None: only the critic learned."""
    provenance: dict[str, Any]
    pretraining_epochs: int | None
    """Set where it was a value pretraining."""


def chain_of(session: Session, policy: Policy, number: int) -> list[Update]:
    """The done updates that led to version `number`, oldest first; the last one made it.

    Raises:
        NotRecorded: there is no such version, or an update on the way has no row.
    """
    version = get_version(session, policy.id, number)
    if version is None:
        raise NotRecorded(f"{policy.name} has no version {number}; its newest is {policy.head}")
    chain: list[Update] = []
    before = version.update_id
    while before is not None:
        update = session.get(Update, before)
        if update is None or update.provenance is None:
            raise NotRecorded(f"update {before}, on the way to version {number}, is not in the database")
        if absent := [name for name in NEEDED if name not in update.provenance]:
            raise NotRecorded(f"update {before} was made by a release that did not record its {', '.join(absent)}")
        chain.append(update)
        before = UUID(update.provenance["checkpoint"]) if update.provenance["checkpoint"] else None
    return chain[::-1]


def recorded(session: Session, policy: Policy, update: Update, updates_done: int) -> RecordedUpdate:
    """One update of the chain; `updates_done` counts those before it.

    Raises:
        NotRecorded: rollouts are missing, their rewards are no longer what they were at the claim, or it was made with
            settings that this release does not know.
    """
    provenance = update.provenance
    assert provenance is not None  # chain_of has looked
    try:
        LearningSettings.model_validate(update.settings)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise NotRecorded(
            f"update {update.id} was made with settings that this release does not know ({what})"
        ) from error
    low, high = provenance["reward_range"]
    head = _reference(session, policy, update.base_version)
    claim = Claim(
        update_id=update.id,
        policy_id=policy.id,
        policy_name=policy.name,
        base_model=policy.base_model,
        training=as_training(policy.training),
        settings=dict(update.settings),
        head=head,
        checkpoint_update_id=UUID(provenance["checkpoint"]) if provenance["checkpoint"] else None,
        updates_done=updates_done,
        pretrainings=provenance.get("pretrainings", 0),  # releases that did not record it let them count
        reward_min=low,
        reward_max=high,
        rollouts=tuple(_rollouts(session, policy.id, update, provenance)),
    )
    made = None if update.version is None else _reference(session, policy, update.version)
    return RecordedUpdate(claim, made, provenance, pretraining_epochs(update))


def _reference(session: Session, policy: Policy, number: int) -> VersionRef:
    version = get_version(session, policy.id, number)
    if version is None:
        raise NotRecorded(f"{policy.name} has no row of version {number}")
    return VersionRef(version.number, version.path, version.sha256, version.adapter_name)


def _rollouts(session: Session, policy_id: UUID, update: Update, provenance: dict[str, Any]) -> list[ClaimedRollout]:
    """With the rewards that counted at the claim. Those of a rollout that an update has claimed never change again, and
    are compared; a pretraining claims none, and what is only ready may be rewarded anew, so it recorded its own.
    """
    rows = [session.get(Rollout, UUID(rollout)) for rollout in provenance["rollouts"]]
    claimed = snapshot(session, policy_id, update.base_version, [row for row in rows if row is not None])
    there = {str(rollout.id) for rollout in claimed if rollout.interactions}
    if missing := [rollout for rollout in provenance["rollouts"] if rollout not in there]:
        raise NotRecorded(f"update {update.id} was trained on rollouts that are gone: {', '.join(missing)}")
    rewards = provenance.get("rewards")
    if rewards is None:  # made by a release that recorded their sums alone
        sums = zip(provenance["returns"], claimed, strict=True)
        changed = [rollout for then, rollout in sums if then != rollout.total_return]
    else:
        as_claimed = [rollout.with_rewards(rewards) for rollout in claimed]
        if pretraining_epochs(update) is not None:
            return as_claimed
        changed = [now for then, now in zip(as_claimed, claimed, strict=True) if then.rewards != now.rewards]
    if changed:
        names = ", ".join(str(rollout.id) for rollout in changed)
        raise NotRecorded(f"update {update.id} was trained on other rewards of rollouts: {names}")
    return claimed
