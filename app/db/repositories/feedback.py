"""Rows of feedback: which rewards count, and what an idempotency key was used for."""

from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import Feedback
from app.rollouts.states import FeedbackStatus

REWARD = "reward"
"""The metric that is trained on; any other is kept and shown."""
ENVIRONMENT_ERROR = "environment_error"
"""The outcome that keeps a rollout out of training."""


def find_by_idempotency_key(session: Session, key_id: UUID, idempotency_key: str) -> Feedback | None:
    return session.scalar(
        select(Feedback).where(Feedback.key_id == key_id, Feedback.idempotency_key == idempotency_key)
    )


def applied_feedback(session: Session, rollout_id: UUID) -> list[Feedback]:
    """The feedback on a rollout and its interactions that counts now."""
    return list(
        session.scalars(
            select(Feedback).where(Feedback.rollout_id == rollout_id, Feedback.status == FeedbackStatus.APPLIED)
        )
    )


def rows_that_may_count(session: Session, rollout_id: UUID) -> list[Feedback]:
    """Applied and late feedback on one rollout, in the order of its arrival."""
    return list(
        session.scalars(
            select(Feedback)
            .where(Feedback.rollout_id == rollout_id, Feedback.status != FeedbackStatus.SUPERSEDED)
            .order_by(Feedback.created_at, Feedback.id)
        )
    )


def applied_rewards(session: Session, rollout_ids: list[UUID]) -> list[Any]:
    """(rollout_id, interaction_id or None, value) of every reward that counts now."""
    return list(
        session.execute(
            select(Feedback.rollout_id, Feedback.interaction_id, Feedback.value).where(
                Feedback.rollout_id.in_(rollout_ids),
                Feedback.metric == REWARD,
                Feedback.value.is_not(None),
                Feedback.status == FeedbackStatus.APPLIED,
            )
        )
    )


def has_environment_error(session: Session, rollout_id: UUID) -> bool:
    """Whether one was ever reported: late or superseded by a newer value, it stands all the same."""
    return (
        session.scalar(
            select(Feedback.id).where(Feedback.rollout_id == rollout_id, Feedback.outcome == ENVIRONMENT_ERROR).limit(1)
        )
        is not None
    )
