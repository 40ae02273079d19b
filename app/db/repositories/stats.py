"""The figures of one policy by which an operator judges it. Every query has its index; none reads a token."""

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db.models import Deployment, Interaction, Policy, PolicyVersion, Rollout, Update, UpdateRollout
from app.db.repositories.rollouts import in_state
from app.rollouts.states import RolloutState, SkipReason

REWARD_WINDOWS = (64, 256)
"""Rollouts, by the time they became ready."""
UPDATES_SHOWN = 50
SWAPS_MEASURED = 200


def policy_stats(session: Session, policy: Policy) -> dict[str, Any]:
    """One policy in figures, as JSON.

    Returns:
        head, live, learning, updates_done, idle_reason, learner_seen_at: its row;
        rollouts {state: n}, skipped {reason: n}, lost_to_age {stale, off_lineage: n};
        interactions {state: n}, untrained {reason: n} (interactions that are context only);
        reward {mean_64, mean_256}: mean return of the newest rollouts that became ready; null without any;
        swap_s {median, p99, versions}: from the reward that completed a batch to the first completion by the version
        it made, over the newest versions that served;
        paused_s, closed_s {median, p99}: how long an engine stood still, and new requests waited, for one swap of whole
        weights, over the newest swaps, those that were undone included;
        updates: the newest first, see `update_series`.
    """
    skipped = skipped_counts(session, policy.id)
    interactions, untrained = interaction_counts(session, policy.id)
    paused, closed = standstills(session, policy.id)
    return {
        "policy": policy.name,
        "head": policy.head,
        "live": policy.live,
        "learning": policy.learning,
        "updates_done": policy.updates_done,
        "idle_reason": policy.idle_reason,
        "learner_seen_at": _iso(policy.learner_seen_at),
        "rollouts": rollout_counts(session, policy.id),
        "skipped": skipped,
        "lost_to_age": {reason: skipped.get(reason, 0) for reason in (SkipReason.STALE, SkipReason.OFF_LINEAGE)},
        "interactions": interactions,
        "untrained": untrained,
        "reward": reward_means(session, policy.id),
        "swap_s": swap_seconds(session, policy.id),
        "paused_s": _quantiles(paused),
        "closed_s": _quantiles(closed),
        "updates": update_series(session, policy.id),
    }


def rollout_counts(session: Session, policy_id: UUID) -> dict[str, int]:
    """state -> how many rollouts; every state is there."""
    rows = session.execute(
        select(Rollout.state, func.count()).where(Rollout.policy_id == policy_id).group_by(Rollout.state)
    )
    return {str(state): 0 for state in RolloutState} | {row.state: row[1] for row in rows}


def skipped_counts(session: Session, policy_id: UUID) -> dict[str, int]:
    """reason -> how many rollouts were skipped for it."""
    rows = session.execute(
        select(Rollout.reason, func.count())
        .where(Rollout.policy_id == policy_id, in_state(Rollout.state, RolloutState.SKIPPED))
        .group_by(Rollout.reason)
    )
    return {str(reason): count for reason, count in rows}


def interaction_counts(session: Session, policy_id: UUID) -> tuple[dict[str, int], dict[str, int]]:
    """(state -> how many interactions, reason -> how many are not trained for it)."""
    states: dict[str, int] = {}
    reasons: dict[str, int] = {}
    rows = session.execute(
        select(Interaction.state, Interaction.reason, func.count())
        .where(Interaction.policy_id == policy_id)
        .group_by(Interaction.state, Interaction.reason)
    )
    for state, reason, count in rows:
        states[state] = states.get(state, 0) + count
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + count
    return states, reasons


def reward_means(session: Session, policy_id: UUID) -> dict[str, float | None]:
    """Mean return over the newest rollouts that became ready, one figure per window."""
    newest = list(
        session.scalars(
            select(Rollout.total_return)
            .where(Rollout.policy_id == policy_id, Rollout.ready_at.is_not(None))
            .order_by(Rollout.ready_at.desc())
            .limit(max(REWARD_WINDOWS))
        )
    )
    returns = [value for value in newest if value is not None]
    return {f"mean_{window}": statistics.fmean(returns[:window]) if returns else None for window in REWARD_WINDOWS}


def swap_seconds(session: Session, policy_id: UUID) -> dict[str, float | int | None]:
    """From the reward that completed a batch to the first completion by the version made of it, in seconds."""
    completed_batch = (
        select(func.max(Rollout.ready_at))
        .join(UpdateRollout, UpdateRollout.rollout_id == Rollout.id)
        .where(UpdateRollout.update_id == PolicyVersion.update_id)
        .scalar_subquery()
    )
    first_served = (
        select(func.min(Interaction.ended_at))
        .where(Interaction.policy_id == policy_id, Interaction.version == PolicyVersion.number)
        .scalar_subquery()
    )
    rows = session.execute(
        select(completed_batch, first_served)
        .where(PolicyVersion.policy_id == policy_id, PolicyVersion.update_id.is_not(None))
        .order_by(PolicyVersion.number.desc())
        .limit(SWAPS_MEASURED)
    )
    seconds = [(served - ready).total_seconds() for ready, served in rows if ready and served]
    return {**_quantiles(seconds), "versions": len(seconds)}


def standstills(session: Session, policy_id: UUID) -> tuple[list[float], list[float]]:
    """Of the newest swaps of whole weights: (seconds paused, seconds closed)."""
    rows = session.execute(
        select(Deployment.paused_ms, Deployment.closed_ms)
        .join(PolicyVersion, PolicyVersion.id == Deployment.version_id)
        .where(
            PolicyVersion.policy_id == policy_id, Deployment.paused_ms.is_not(None), Deployment.closed_ms.is_not(None)
        )
        .group_by(Deployment.paused_ms, Deployment.closed_ms)  # one that was undone is noted at both its versions
        .order_by(func.max(Deployment.updated_at).desc())
        .limit(SWAPS_MEASURED)
    ).all()
    return [row.paused_ms / 1e3 for row in rows], [row.closed_ms / 1e3 for row in rows]


def _quantiles(seconds: Sequence[float]) -> dict[str, float | int | None]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered) if ordered else None,
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None,
    }


def update_series(
    session: Session, policy_id: UUID, limit: int = UPDATES_SHOWN, before: UUID | None = None
) -> list[dict[str, Any]]:
    """The newest updates (older than `before`) first: what each trained on, its health figures, its seconds.

    Returns:
        Per update its row, and over its rollouts: rollouts (n), mean_return, mean_staleness, max_staleness,
        masked_share (mean over rollouts; null until it is done).
    """
    newest = select(Update.id).where(Update.policy_id == policy_id).order_by(Update.id.desc()).limit(limit)
    if before is not None:
        newest = newest.where(Update.id < before)
    trained = (
        select(
            UpdateRollout.update_id,
            func.count().label("rollouts"),
            func.avg(UpdateRollout.total_return).label("mean_return"),
            func.avg(UpdateRollout.staleness).label("mean_staleness"),
            func.max(UpdateRollout.staleness).label("max_staleness"),
            func.avg(UpdateRollout.masked_share).label("masked_share"),
        )
        .where(UpdateRollout.update_id.in_(newest))
        .group_by(UpdateRollout.update_id)
        .subquery()
    )
    rows = session.execute(
        select(Update, trained).join(trained, trained.c.update_id == Update.id).order_by(Update.id.desc())
    )
    return [
        {
            "id": str(row.Update.id),
            "state": row.Update.state,
            "owner": row.Update.owner,
            "base_version": row.Update.base_version,
            "version": row.Update.version,
            "started_at": _iso(row.Update.started_at),
            "ended_at": _iso(row.Update.ended_at),
            "error": row.Update.error,
            "rollouts": row.rollouts,
            "mean_return": row.mean_return,
            "mean_staleness": float(row.mean_staleness),
            "max_staleness": row.max_staleness,
            "masked_share": row.masked_share,
            "health": row.Update.health,
            "seconds": row.Update.seconds,
        }
        for row in rows
    ]


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
