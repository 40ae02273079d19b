"""What a rollout has earned: the newest value per target and metric counts, older ones are superseded."""

from sqlalchemy.orm import Session

from app.db.models import Feedback, Rollout
from app.db.repositories.feedback import REWARD, rows_that_may_count
from app.rollouts.states import FeedbackStatus


def count_feedback(rollout: Rollout, feedback: Feedback, applied: list[Feedback]) -> None:
    """Let a feedback row count from now on, and renew the rollout's return.

    A value replaces everything earlier on its target and metric; an outcome without a value replaces only outcomes
    without a value, so that a remark does not take a reward back; a comment replaces nothing.

    Args:
        rollout: locked by the caller.
        applied: all rows of the rollout that count so far; left as those that count now.
    """
    for older in [row for row in applied if _replaces(feedback, row)]:
        older.status = FeedbackStatus.SUPERSEDED
        applied.remove(older)
    feedback.status = FeedbackStatus.APPLIED
    applied.append(feedback)
    rewards = [row.value for row in applied if row.metric == REWARD and row.value is not None]
    rollout.total_return = sum(rewards) if rewards else None


def count_late_feedback(session: Session, rollout: Rollout) -> None:
    """After a failed update: what came while it ran counts after all.

    Everything is counted again in the order of its arrival: a row that came late once may be older than one that has
    counted since.
    """
    applied: list[Feedback] = []
    for feedback in rows_that_may_count(session, rollout.id):
        count_feedback(rollout, feedback, applied)


def _replaces(newer: Feedback, older: Feedback) -> bool:
    if (newer.interaction_id, newer.metric) != (older.interaction_id, older.metric):
        return False
    if newer.value is not None:
        return older.value is not None or older.outcome is not None
    return newer.outcome is not None and older.value is None and older.outcome is not None
