"""The rollout's life: interactions begin and end, the rollout closes, and every change of state goes one way."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db.models import Interaction, Rollout
from app.db.repositories.feedback import has_environment_error
from app.db.repositories.rollouts import (
    completed_interactions,
    count_interactions,
    interaction_outcomes,
    lock_interaction,
    lock_named_rollout,
    lock_rollout,
)
from app.db.types import clock
from app.errors import Conflict, NotFound
from app.rollouts.claimed import Logprobs, Tokens
from app.rollouts.parents import find_parent
from app.rollouts.provenance import Labelled, version_runs
from app.rollouts.states import TRANSITIONS, InteractionState, RolloutState, SkipReason
from app.rollouts.trainability import Outcome, verdict

MAX_INTERACTIONS = 1000
"""Of one rollout: each call is compared with all before it, and an update reads them all."""
TICK = timedelta(microseconds=1)
"""The finest step of time that every database keeps."""


class IllegalTransition(Exception):
    """A change of state that the table does not have: a mistake in this code, never in a request."""


@dataclass(frozen=True)
class NewInteraction:
    """A request that is about to be sent to the engine."""

    id: UUID
    policy_id: UUID
    key_id: UUID
    client_rollout_id: str | None
    """The caller's name for its rollout, or our id of one of its rollouts; None: a rollout of its own."""
    version: int
    prompt_ids: Tokens
    """(n,) int32: the whole prompt."""
    temperature: float
    sampling: dict[str, Any]
    untrainable: SkipReason | None
    detail: str | None
    request: bytes | None
    replica: str | None
    tags: dict[str, Any]


@dataclass(frozen=True)
class Begun:
    interaction_id: UUID
    rollout_id: UUID
    parent_id: UUID | None
    untrainable: SkipReason | None
    """Why it will not be trained, as far as that is known before it runs."""


@dataclass(frozen=True)
class Completed:
    """What the engine sampled."""

    completion_ids: Tokens
    """(n,) int32, the stop token included."""
    logprobs: Logprobs | None
    """(n,) float32, natural logs at the request's temperature."""
    finish_reason: str
    response: bytes | None
    version: int
    """The version that it was sent to in the end."""
    replica: str | None
    first_token_at: datetime | None
    labelled: Labelled | None = None
    """Which weights sampled the tokens, by their labels; None: `version` all of them, as an adapter does."""


def begin_interaction(session: Session, new: NewInteraction) -> Begun:
    """Log a request before it runs; finds or creates its rollout.

    Raises:
        Conflict: rollout_full.
    """
    rollout, now, is_new = _rollout_of(session, new)
    earlier = [] if is_new else completed_interactions(session, rollout.id)
    if not is_new and count_interactions(session, rollout.id) >= MAX_INTERACTIONS:
        raise Conflict(
            f"The rollout {new.client_rollout_id!r} has {MAX_INTERACTIONS} interactions, which is as many as one may "
            "have: post its final reward or close it, and give the next episode an id of its own.",
            code="rollout_full",
            param="rollout_id",
        )
    parent_id, known = find_parent(new.prompt_ids, earlier)
    reason, detail = new.untrainable, new.detail
    if rollout.closing or rollout.state != RolloutState.OPEN:
        reason = SkipReason.AFTER_CLOSE
        detail = f"the rollout was {'closing' if rollout.state == RolloutState.OPEN else rollout.state} already"
    else:
        rollout.active_at = now
        rollout.tags = {**rollout.tags, **new.tags}
    session.add(
        Interaction(
            id=new.id,
            policy_id=new.policy_id,
            rollout_id=rollout.id,
            parent_id=parent_id,
            version=new.version,
            new_prompt_ids=new.prompt_ids[known:],
            prompt_tokens=len(new.prompt_ids),
            temperature=new.temperature,
            sampling=new.sampling,
            reason=reason,
            detail=detail,
            request=new.request,
            replica=new.replica,
            # the clock may have stepped back since; whoever reads them in this order must meet the parent first
            started_at=max([now, *(row.started_at + TICK for row in earlier if row.id == parent_id)]),
        )
    )
    session.flush()
    return Begun(new.id, rollout.id, parent_id, reason)


def complete_interaction(session: Session, interaction_id: UUID, done: Completed) -> None:
    """Store what was sampled. Ids and log-probs that do not fit together are kept as context and never trained.

    Raises:
        Conflict: interaction_ended: it was aborted or completed before, so its reply must not be delivered.
    """
    rollout, interaction, now = _running(session, interaction_id)
    _store(interaction, done)
    whose = _note_versions(session, interaction, done)
    if interaction.reason is None:
        fault = _untrainable(done) or whose
        if fault is not None:
            interaction.reason, interaction.detail = fault
    _end(session, rollout, interaction, InteractionState.COMPLETED, now)


def abort_interaction(session: Session, interaction_id: UUID, detail: str, partial: Completed | None = None) -> None:
    """End an interaction whose reply was not delivered whole. What was sampled is kept and never trained or continued.

    Does nothing if it has ended already.
    """
    try:
        rollout, interaction, now = _running(session, interaction_id)
    except Conflict:
        return
    if partial is not None:
        _store(interaction, partial)
    if interaction.reason is None:
        interaction.reason, interaction.detail = SkipReason.ABORTED, detail
    _end(session, rollout, interaction, InteractionState.ABORTED, now)


def close_rollout(session: Session, rollout: Rollout) -> None:
    """No more is to come: the rollout leaves `open` now, or with its last running interaction. Twice is fine."""
    rollout, now = lock_rollout(session, rollout.id)
    if rollout.state == RolloutState.OPEN:
        rollout.closing = True
        settle(session, rollout, now)
    session.flush()


def transition(rollout: Rollout, to: RolloutState, reason: SkipReason | None = None) -> None:
    """Change a rollout's state: the only place that does.

    Raises:
        IllegalTransition: the table has no such change, or a reason is missing or out of place.
    """
    state = RolloutState(rollout.state)
    if to not in TRANSITIONS[state]:
        raise IllegalTransition(f"rollout {rollout.id}: {state} -> {to}")
    if state is RolloutState.SKIPPED and rollout.reason != SkipReason.NO_REWARD:
        raise IllegalTransition(f"rollout {rollout.id}: skipped({rollout.reason}) is final")
    if state is to is RolloutState.SKIPPED and reason is not SkipReason.ENVIRONMENT_ERROR:
        raise IllegalTransition(f"rollout {rollout.id}: {state}({rollout.reason}) -> {to}({reason})")
    if (to is RolloutState.SKIPPED) != (reason is not None):
        raise IllegalTransition(f"rollout {rollout.id}: {to} with reason {reason}")
    rollout.state = to
    rollout.reason = reason


def settle(session: Session, rollout: Rollout, now: datetime, *, environment_error: bool | None = None) -> None:
    """Let a closing rollout leave `open` once nothing that belongs to it runs. The caller holds its lock.

    environment_error: whether feedback says so; None: ask the database.
    """
    if not rollout.closing:
        return
    session.flush()
    outcomes = rollout_outcomes(session, [rollout.id])[rollout.id]
    if any(outcome.holds_open for outcome in outcomes):
        return
    if environment_error is None:
        environment_error = has_environment_error(session, rollout.id)
    state, reason = verdict(outcomes, rewarded=rollout.total_return is not None, environment_error=environment_error)
    transition(rollout, state, reason)
    rollout.closed_at = now
    if state is RolloutState.READY:
        rollout.ready_at = now


def rollout_outcomes(session: Session, rollout_ids: Sequence[UUID]) -> dict[UUID, list[Outcome]]:
    return {
        rollout_id: [
            Outcome(InteractionState(row.state), SkipReason(row.reason) if row.reason else None) for row in rows
        ]
        for rollout_id, rows in interaction_outcomes(session, rollout_ids).items()
    }


def _rollout_of(session: Session, new: NewInteraction) -> tuple[Rollout, datetime, bool]:
    """The request's rollout, locked; the database's clock; whether the rollout was created just now."""
    name = new.client_rollout_id
    existing = lock_named_rollout(session, new.key_id, new.policy_id, name) if name is not None else None
    if existing is not None:
        return *existing, False
    now = clock(session)
    rollout = Rollout(
        id=uuid7(),
        key_id=new.key_id,
        policy_id=new.policy_id,
        client_id=name,
        tags=new.tags,
        state=RolloutState.OPEN,
        closing=False,
        opened_at=now,
        active_at=now,
    )
    if name is None:
        session.add(rollout)
        session.flush()
        return rollout, now, True
    try:
        with session.begin_nested():
            session.add(rollout)
    except IntegrityError:
        # another connection inserted it just before
        existing = lock_named_rollout(session, new.key_id, new.policy_id, name)
        if existing is None:
            raise
        return *existing, False
    return rollout, now, True


def _running(session: Session, interaction_id: UUID) -> tuple[Rollout, Interaction, datetime]:
    found = lock_interaction(session, interaction_id)
    if found is None:
        raise NotFound(f"there is no interaction {interaction_id}", code="interaction_not_found")
    if found[1].state != InteractionState.RUNNING:
        raise Conflict(
            f"Interaction {interaction_id} has ended already ({found[1].state}): it ran beyond the request limit. "
            "Send the request again.",
            code="interaction_ended",
            headers={"x-should-retry": "true"},
        )
    return found


def _store(interaction: Interaction, done: Completed) -> None:
    interaction.completion_ids = np.asarray(done.completion_ids, dtype=np.int32)
    whole = done.logprobs is not None and len(done.logprobs) == len(done.completion_ids)
    interaction.logprobs = np.asarray(done.logprobs, dtype=np.float32) if whole else None
    interaction.finish_reason = done.finish_reason
    interaction.response = done.response
    interaction.version = done.version
    interaction.replica = done.replica
    interaction.first_token_at = done.first_token_at


def _note_versions(session: Session, interaction: Interaction, done: Completed) -> tuple[SkipReason, str] | None:
    """Whose tokens they are, where the engine has told; why they are not trained, if that cannot be made out."""
    if done.labelled is None:
        return None
    runs = version_runs(session, interaction.policy_id, done.labelled, len(done.completion_ids))
    if not runs:
        return SkipReason.UNKNOWN_WEIGHTS, (
            f"the engine said {list(done.labelled)} of {len(done.completion_ids)} tokens, which are no versions of the "
            "policy: it was restarted and control had not noticed, or somebody else loads weights into it"
        )
    interaction.version = min(number for number, _ in runs)
    interaction.version_runs = [list(run) for run in runs] if len(runs) > 1 else None
    return None


def _untrainable(done: Completed) -> tuple[SkipReason, str] | None:
    count = len(done.completion_ids)
    if count == 0:
        return SkipReason.NO_ACTION_TOKENS, "the completion is empty"
    if done.logprobs is None or len(done.logprobs) != count:
        got = 0 if done.logprobs is None else len(done.logprobs)
        return SkipReason.MISSING_LOGPROBS, f"the engine returned {got} log-probs for {count} tokens"
    if not np.isfinite(done.logprobs).all():
        return SkipReason.MISSING_LOGPROBS, "the engine returned a log-prob that is not finite"
    return None


def _end(session: Session, rollout: Rollout, interaction: Interaction, state: InteractionState, now: datetime) -> None:
    interaction.state = state
    interaction.ended_at = now
    if rollout.state == RolloutState.OPEN:
        rollout.active_at = now
        settle(session, rollout, now)
    session.flush()
