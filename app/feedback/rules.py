"""The rules of reward: who may give it, what it changes, and what the caller is told."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db.models import ApiKey, Feedback, Interaction, Policy, Rollout
from app.db.repositories.feedback import (
    ENVIRONMENT_ERROR,
    REWARD,
    applied_feedback,
    find_by_idempotency_key,
    has_environment_error,
)
from app.db.repositories.rollouts import (
    as_uuid,
    count_interactions,
    interaction_outcomes,
    lock_rollout,
    rollout_of_interaction,
)
from app.db.repositories.versions import parent_chain
from app.errors import Conflict, InvalidRequest, NotFound
from app.feedback.messages import describe
from app.policies.learning import stored_max_staleness
from app.rollouts.lifecycle import settle, transition
from app.rollouts.provenance import sampled_versions
from app.rollouts.reach import find_rollout, may_reach
from app.rollouts.rewards import count_feedback
from app.rollouts.states import FeedbackStatus, InteractionState, RolloutState, SkipReason
from app.rollouts.trainability import too_old


@dataclass(frozen=True)
class NewFeedback:
    """A request to POST /v1/feedback. At least one target is given; both must agree."""

    rollout_id: str | None
    """Our id, or the client's."""
    interaction_id: str | None
    value: float | None
    """The reward, or the value of another metric."""
    body_sha256: str
    """Of the request's body: the same idempotency key must come with the same one."""
    metric: str = REWARD
    final: bool | None = None
    """True: the rollout is over. None: see `_is_final`."""
    outcome: str | None = None
    """`environment_error` keeps the rollout out of training; any other word is kept and shown."""
    comment: str | None = None
    idempotency_key: str | None = None


def apply_feedback(session: Session, key: ApiKey, new: NewFeedback) -> dict[str, Any]:
    """Store feedback, let it count if it is in time, and say what became of the rollout and why.

    Returns:
        The reply's body: {id, rollout_id, interaction_id, status, rollout: {state, reason}, message}. The same
        idempotency key with the same body gives the first reply again, word for word, and changes nothing.

    Raises:
        InvalidRequest, NotFound: see `_find_target` and `_check`. Conflict: idempotency_key_reused.
    """
    repeated = _answered_before(session, key, new)  # before its target, which may be another one this time
    if repeated is not None:
        return repeated
    found, interaction_id = _find_target(session, key, new)
    rollout, now = lock_rollout(session, found.id)
    repeated = _answered_before(session, key, new)
    if repeated is not None:
        return repeated
    _check(session, rollout, new)
    _check_turn(session, interaction_id, new)
    feedback = Feedback(
        id=uuid7(),
        rollout_id=rollout.id,
        interaction_id=interaction_id,
        key_id=key.id,
        metric=new.metric,
        value=new.value,
        final=_is_final(session, rollout, interaction_id, new),
        outcome=new.outcome,
        comment=new.comment,
        status=FeedbackStatus.LATE,
        idempotency_key=new.idempotency_key,
        body_sha256=new.body_sha256,
        created_at=now,
    )
    try:
        # a savepoint only where the insert can clash
        with session.begin_nested() if new.idempotency_key else nullcontext():
            _take_effect(session, rollout, feedback)
            feedback.answer = _answer(rollout, feedback)
            session.add(feedback)
            session.flush()
    except IntegrityError:
        # the same idempotency key was used for another rollout at this very moment
        repeated = _answered_before(session, key, new)
        if repeated is None:
            raise
        return repeated
    return feedback.answer


def _find_target(session: Session, key: ApiKey, new: NewFeedback) -> tuple[Rollout, UUID | None]:
    """The rollout (and interaction) that feedback is about, as far as the key may reach it; takes no lock.

    Raises:
        InvalidRequest: no target, or two that disagree. NotFound, Conflict: see `find_rollout`.
    """
    if new.interaction_id is None:
        if new.rollout_id is None:
            raise InvalidRequest("give interaction_id or rollout_id", code="target_missing", param="rollout_id")
        return find_rollout(session, key=key, policy_id=None, identifier=new.rollout_id), None
    interaction_id = as_uuid(new.interaction_id)
    rollout = rollout_of_interaction(session, interaction_id) if interaction_id else None
    if rollout is None or not may_reach(key, rollout):
        raise NotFound(
            f"There is no interaction {new.interaction_id!r} that this key may reach; use the reply's id, which is "
            "also its X-Interaction-Id header.",
            code="interaction_not_found",
            param="interaction_id",
        )
    named = new.rollout_id
    if named is not None and named != rollout.client_id and as_uuid(named) != rollout.id:
        raise InvalidRequest(
            f"interaction {interaction_id} belongs to rollout {rollout.id}, not to {named!r}; give one of the "
            "two ids, or two that agree",
            code="target_mismatch",
            param="rollout_id",
        )
    return rollout, interaction_id


def _answer(rollout: Rollout, feedback: Feedback) -> dict[str, Any]:
    return {
        "id": str(feedback.id),
        "rollout_id": str(rollout.id),
        "interaction_id": str(feedback.interaction_id) if feedback.interaction_id else None,
        "status": str(feedback.status),
        "rollout": {"state": str(rollout.state), "reason": str(rollout.reason) if rollout.reason else None},
        "message": describe(rollout, feedback),
    }


def _answered_before(session: Session, key: ApiKey, new: NewFeedback) -> dict[str, Any] | None:
    if new.idempotency_key is None:
        return None
    earlier = find_by_idempotency_key(session, key.id, new.idempotency_key)
    if earlier is None:
        return None
    if earlier.body_sha256 != new.body_sha256:
        raise Conflict(
            f"The idempotency key {new.idempotency_key!r} was used with another body; repeat that body, or use a new "
            "key for new feedback.",
            code="idempotency_key_reused",
            param="idempotency_key",
        )
    return earlier.answer


def _check(session: Session, rollout: Rollout, new: NewFeedback) -> None:
    if new.value is None and new.outcome is None and new.comment is None:
        raise InvalidRequest("give a reward, an outcome or a comment", code="reward_missing", param="reward")
    if new.value is None:
        return
    if not math.isfinite(new.value):
        raise InvalidRequest(
            f"the {new.metric} is {new.value}; send a finite number", code="reward_not_finite", param="reward"
        )
    policy = session.get_one(Policy, rollout.policy_id)
    if new.metric == REWARD and not policy.reward_min <= new.value <= policy.reward_max:
        raise InvalidRequest(
            f"the reward {new.value} is outside the range [{policy.reward_min}, {policy.reward_max}] that policy "
            f"{policy.name!r} declares; scale it into that range, or send it under another metric to record it only",
            code="reward_out_of_range",
            param="reward",
        )


def _check_turn(session: Session, interaction_id: UUID | None, new: NewFeedback) -> None:
    """A call that came after its rollout's end is no turn of it: its reward must not change what the others earned."""
    if interaction_id is None or new.value is None or new.metric != REWARD:
        return
    interaction = session.get_one(Interaction, interaction_id)
    if interaction.reason == SkipReason.AFTER_CLOSE:
        raise Conflict(
            f"Interaction {interaction_id} came after the end of its rollout {interaction.rollout_id} and is no turn "
            "of it, so no reward can be posted for it. Give every episode a rollout id of its own; the header "
            "X-Untrained-Reason of a reply says when one has ended already.",
            code="interaction_after_close",
            param="interaction_id",
        )


def _is_final(session: Session, rollout: Rollout, interaction_id: UUID | None, new: NewFeedback) -> bool:
    """Whether nothing more is to come; where the caller does not say: a reward for a whole rollout or its only call.

    One turn of a rollout that its client named is not the end of it, and only a reward ends anything by itself.
    """
    if new.final is not None:
        return new.final
    if new.metric != REWARD or new.value is None:
        return False
    if interaction_id is None:
        return True
    return rollout.client_id is None and count_interactions(session, rollout.id) == 1


def _take_effect(session: Session, rollout: Rollout, feedback: Feedback) -> None:
    """Count feedback where the rollout's state still lets it change something; elsewhere it stays `late`.

    What training does not look at (other metrics, comments) is never late.
    """
    now = feedback.created_at
    failed = feedback.outcome == ENVIRONMENT_ERROR
    lacked_reward = rollout.reason == SkipReason.NO_REWARD
    if lacked_reward and (failed or has_environment_error(session, rollout.id)):
        # though it came after the close: no reward may make this rollout good
        transition(rollout, RolloutState.SKIPPED, SkipReason.ENVIRONMENT_ERROR)
    in_time = rollout.reason == SkipReason.NO_REWARD and _is_in_time(session, rollout, feedback)
    counts = in_time or (lacked_reward and failed) or rollout.state in (RolloutState.OPEN, RolloutState.READY)
    if (failed or _is_reward(feedback)) and not counts:
        return
    count_feedback(rollout, feedback, applied_feedback(session, rollout.id))
    if rollout.state == RolloutState.OPEN:
        rollout.active_at = now
        rollout.closing = rollout.closing or feedback.final or failed
        # this row is not stored yet; an earlier one is, whatever came after it
        settle(session, rollout, now, environment_error=failed or None)
    elif rollout.state == RolloutState.READY and failed:
        transition(rollout, RolloutState.SKIPPED, SkipReason.ENVIRONMENT_ERROR)
    elif in_time:
        transition(rollout, RolloutState.READY)
        rollout.ready_at = now


def _is_reward(feedback: Feedback) -> bool:
    return feedback.metric == REWARD and feedback.value is not None


def _is_in_time(session: Session, rollout: Rollout, feedback: Feedback) -> bool:
    """Whether this is the reward that a skipped rollout lacked, and its samples are still young enough."""
    if not _is_reward(feedback) or feedback.outcome == ENVIRONMENT_ERROR:
        return False
    policy = session.get_one(Policy, rollout.policy_id)
    versions = [
        version
        for row in interaction_outcomes(session, [rollout.id])[rollout.id]
        if row.state == InteractionState.COMPLETED and row.reason is None
        for version in sampled_versions(row.version, row.version_runs)
    ]
    if policy.head is None or not versions:
        return False
    chain = parent_chain(session, policy.id, policy.head, back_to=min(versions))
    return too_old(versions, chain, stored_max_staleness(policy.settings)) is None
