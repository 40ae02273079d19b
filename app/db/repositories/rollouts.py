"""Rows of rollouts and interactions, as the rollout's life needs them: locks first, then the facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, exists, func, literal, select
from sqlalchemy.orm import InstrumentedAttribute, Session, defer

from app.db.models import Interaction, Rollout
from app.db.types import db_now
from app.rollouts.states import InteractionState, RolloutState


def in_state(column: InstrumentedAttribute[str], state: RolloutState | InteractionState) -> ColumnElement[bool]:
    """`column = 'state'` with the word itself in the SQL: a partial index is not used for a bound parameter."""
    return column == literal(str(state), literal_execute=True)


def lock_rollout(session: Session, rollout_id: UUID) -> tuple[Rollout, datetime]:
    """The rollout's row, locked until the transaction ends and read afresh, and the database's clock.

    Every write about a rollout begins here. FOR NO KEY UPDATE excludes other writers, yet rows that refer to the
    rollout can be inserted meanwhile.
    """
    locked = _lock_where(session, Rollout.id == rollout_id)
    if locked is None:
        raise LookupError(f"there is no rollout {rollout_id}")
    return locked


def lock_rollouts(session: Session, ids: Sequence[UUID], *, skip_locked: bool = False) -> list[Rollout]:
    """Several rollouts, locked in the order of their ids, which is everybody's order."""
    return list(
        session.scalars(
            select(Rollout)
            .where(Rollout.id.in_(ids))
            .order_by(Rollout.id)
            .with_for_update(key_share=True, skip_locked=skip_locked)
            .execution_options(populate_existing=True)
        )
    )


def lock_interaction(session: Session, interaction_id: UUID) -> tuple[Rollout, Interaction, datetime] | None:
    """An interaction and its rollout, both locked, and the database's clock; None: there is no such interaction.

    What is large and never changes (prompt, request) is left in the database.
    """
    row = session.execute(
        select(Rollout, Interaction, db_now())
        .join(Interaction, Interaction.rollout_id == Rollout.id)
        .options(defer(Interaction.new_prompt_ids), defer(Interaction.request), defer(Interaction.sampling))
        .where(Interaction.id == interaction_id)
        # both: a row that was changed while this waited is read again only if it is locked too
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).one_or_none()
    return None if row is None else (row[0], row[1], row[2])


def lock_named_rollout(session: Session, key_id: UUID, policy_id: UUID, name: str) -> tuple[Rollout, datetime] | None:
    """The caller's own rollout that it named `name`, or whose id (ours) `name` is."""
    own = (Rollout.key_id == key_id, Rollout.policy_id == policy_id)
    identifier = as_uuid(name)
    named = _lock_where(session, *own, Rollout.client_id == name)
    if named is None and identifier is not None:
        return _lock_where(session, *own, Rollout.id == identifier)
    return named


def _lock_where(session: Session, *conditions: ColumnElement[bool]) -> tuple[Rollout, datetime] | None:
    row = session.execute(
        select(Rollout, db_now())
        .where(*conditions)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).one_or_none()
    return None if row is None else (row[0], row[1])


def find_rollouts(session: Session, identifier: str, *, key_id: UUID | None, policy_id: UUID | None) -> list[Rollout]:
    """At most two rollouts with this id (ours, or the client's), of one key and one policy if these are given."""
    reachable: list[ColumnElement[bool]] = []
    if key_id is not None:
        reachable.append(Rollout.key_id == key_id)
    if policy_id is not None:
        reachable.append(Rollout.policy_id == policy_id)
    ours = as_uuid(identifier)
    if ours is not None:
        rollout = session.scalar(select(Rollout).where(Rollout.id == ours, *reachable))
        if rollout is not None:
            return [rollout]
    return list(session.scalars(select(Rollout).where(Rollout.client_id == identifier, *reachable).limit(2)))


def as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def completed_interactions(session: Session, rollout_id: UUID) -> list[Any]:
    """(id, parent_id, new_prompt_ids, completion_ids, started_at) of what can be continued, parents before children."""
    return list(
        session.execute(
            select(
                Interaction.id,
                Interaction.parent_id,
                Interaction.new_prompt_ids,
                Interaction.completion_ids,
                Interaction.started_at,
            )
            .where(Interaction.rollout_id == rollout_id, Interaction.state == InteractionState.COMPLETED)
            .order_by(Interaction.started_at, Interaction.id)
        )
    )


def interaction_outcomes(session: Session, rollout_ids: Sequence[UUID]) -> dict[UUID, list[Any]]:
    """rollout id -> (id, version, version_runs, state, reason) of its interactions."""
    found: dict[UUID, list[Any]] = {rollout_id: [] for rollout_id in rollout_ids}
    rows = session.execute(
        select(
            Interaction.rollout_id,
            Interaction.id,
            Interaction.version,
            Interaction.version_runs,
            Interaction.state,
            Interaction.reason,
        ).where(Interaction.rollout_id.in_(rollout_ids))
    )
    for row in rows:
        found[row.rollout_id].append(row)
    return found


def rollout_of_interaction(session: Session, interaction_id: UUID) -> Rollout | None:
    """The rollout of an interaction, not locked."""
    return session.scalar(
        select(Rollout).join(Interaction, Interaction.rollout_id == Rollout.id).where(Interaction.id == interaction_id)
    )


def count_interactions(session: Session, rollout_id: UUID) -> int:
    return session.execute(
        select(func.count()).select_from(Interaction).where(Interaction.rollout_id == rollout_id)
    ).scalar_one()


def overdue_interactions(session: Session, started_before: datetime, limit: int) -> list[tuple[UUID, UUID]]:
    """(id, rollout_id) of interactions that still run, oldest first."""
    rows = session.execute(
        select(Interaction.id, Interaction.rollout_id)
        .where(in_state(Interaction.state, InteractionState.RUNNING), Interaction.started_at < started_before)
        .order_by(Interaction.started_at)
        .limit(limit)
    )
    return [(row.id, row.rollout_id) for row in rows]


def idle_rollouts(session: Session, active_before: datetime, *, rewarded: bool, limit: int) -> list[UUID]:
    """Open rollouts (with a reward, or without) in which nothing runs, the longest idle first."""
    running = exists().where(
        Interaction.rollout_id == Rollout.id, in_state(Interaction.state, InteractionState.RUNNING)
    )
    return list(
        session.scalars(
            select(Rollout.id)
            .where(
                in_state(Rollout.state, RolloutState.OPEN),
                Rollout.active_at < active_before,
                Rollout.total_return.is_not(None) if rewarded else Rollout.total_return.is_(None),
                ~running,
            )
            .order_by(Rollout.active_at)
            .limit(limit)
        )
    )


def ready_rollouts_outside(session: Session, policy_id: UUID, versions: Sequence[int], limit: int) -> list[UUID]:
    """Ready rollouts of which a trainable interaction was sampled by none of these versions, the oldest first."""
    outside = exists().where(
        Interaction.rollout_id == Rollout.id,
        Interaction.state == InteractionState.COMPLETED,
        Interaction.reason.is_(None),
        Interaction.version.not_in(versions),
    )
    return list(
        session.scalars(
            select(Rollout.id)
            .where(Rollout.policy_id == policy_id, in_state(Rollout.state, RolloutState.READY), outside)
            .order_by(Rollout.ready_at)
            .limit(limit)
        )
    )


@dataclass(frozen=True)
class Sampled:
    """What was sampled in one rollout."""

    interactions: int
    versions: tuple[int, ...]
    """Numbers of the policy versions that served it, ascending."""
    completion_tokens: int


def sampled(session: Session, rollout_ids: Sequence[UUID]) -> dict[UUID, Sampled]:
    """By rollout, for a whole page of them in one query."""
    rows = session.execute(
        select(
            Interaction.rollout_id,
            Interaction.version,
            func.count(),
            # four bytes a token
            func.coalesce(func.sum(func.length(Interaction.completion_ids)), 0) / 4,
        )
        .where(Interaction.rollout_id.in_(rollout_ids))
        .group_by(Interaction.rollout_id, Interaction.version)
        .order_by(Interaction.version)
    )
    found = dict.fromkeys(rollout_ids, Sampled(0, (), 0))
    for rollout_id, version, count, tokens in rows:
        before = found[rollout_id]
        found[rollout_id] = Sampled(
            before.interactions + count, (*before.versions, version), before.completion_tokens + int(tokens)
        )
    spanning = session.execute(
        select(Interaction.rollout_id, Interaction.version_runs).where(
            Interaction.rollout_id.in_(rollout_ids), Interaction.version_runs.is_not(None)
        )
    )
    for rollout_id, runs in spanning:
        before = found[rollout_id]
        versions = sorted({*before.versions, *(number for number, _ in runs)})
        found[rollout_id] = replace(before, versions=tuple(versions))
    return found
