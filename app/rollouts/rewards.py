"""What a rollout has earned: the newest value per target and metric counts, older ones are superseded."""

from sqlalchemy.orm import Session

from app.db.models import Feedback, Rollout
from app.db.repositories.feedback import applied_rewards, counting_rows, late_rows
from app.rollouts.states import FeedbackStatus


def count_feedback(session: Session, rollout: Rollout, feedback: Feedback) -> None:
    """Let a feedback row count from now on, and renew the rollout's return. The caller holds the rollout's lock.

    A value replaces everything earlier on its target and metric; an outcome without a value replaces only outcomes
    without a value, so that a remark does not take a reward back; a comment replaces nothing.
    """
    if feedback.value is not None or feedback.outcome is not None:
        for older in counting_rows(session, rollout.id, feedback.interaction_id, feedback.metric):
            if older is not feedback and (feedback.value is not None or older.value is None):
                older.status = FeedbackStatus.SUPERSEDED
    feedback.status = FeedbackStatus.APPLIED
    session.flush()
    rewards = [row.value for row in applied_rewards(session, [rollout.id])]
    rollout.total_return = sum(rewards) if rewards else None


def count_late_feedback(session: Session, rollout: Rollout) -> None:
    """After a failed update: what came while it ran counts after all, in the order of its arrival."""
    for feedback in late_rows(session, rollout.id):
        count_feedback(session, rollout, feedback)
