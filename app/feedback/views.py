"""A rollout as JSON: its state in words, its interactions, its rewards."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from app.db.models import Feedback, Interaction, Rollout
from app.db.repositories.feedback import REWARD
from app.db.repositories.pages import feedback_of
from app.db.repositories.updates import whole_interactions
from app.feedback.messages import explain
from app.rollouts.states import FeedbackStatus, SkipReason

Json = dict[str, Any]


def rollout_view(session: Session, rollout: Rollout) -> Json:
    """Everything about it but the texts and tokens."""
    feedback = feedback_of(session, rollout.id)
    interactions = whole_interactions(session, [rollout.id])[rollout.id]
    return {
        **rollout_row(rollout),
        "explanation": explain(rollout),
        "interactions": [interaction_view(interaction, feedback) for interaction in interactions],
        "feedback": [_feedback_view(row) for row in feedback],
    }


def rollout_row(rollout: Rollout) -> Json:
    """The rollout's own columns."""
    return {
        "id": str(rollout.id),
        "client_id": rollout.client_id,
        "policy_id": str(rollout.policy_id),
        "state": rollout.state,
        "reason": rollout.reason,
        "return": rollout.total_return,
        "tags": rollout.tags,
        "opened_at": moment(rollout.opened_at),
        "active_at": moment(rollout.active_at),
        "closed_at": moment(rollout.closed_at),
        "ready_at": moment(rollout.ready_at),
        "update_id": str(rollout.update_id) if rollout.update_id else None,
    }


def interaction_view(interaction: Interaction, feedback: Sequence[Feedback]) -> Json:
    rewards = [
        row.value
        for row in feedback
        if row.interaction_id == interaction.id
        and row.metric == REWARD
        and row.value is not None
        and row.status == FeedbackStatus.APPLIED
    ]
    return {
        "id": str(interaction.id),
        "parent_id": str(interaction.parent_id) if interaction.parent_id else None,
        "version": interaction.version,
        "version_runs": [
            {"version": number, "tokens": tokens}
            for number, tokens in interaction.version_runs or _one_run(interaction)
        ],
        "state": interaction.state,
        "trainable": interaction.reason is None,
        "reason": interaction.reason,
        "detail": interaction.detail,
        "reward": sum(rewards) if rewards else None,
        "prompt_tokens": interaction.prompt_tokens,
        "completion_tokens": 0 if interaction.completion_ids is None else len(interaction.completion_ids),
        "temperature": interaction.temperature,
        "finish_reason": interaction.finish_reason,
        "started_at": moment(interaction.started_at),
        "first_token_at": moment(interaction.first_token_at),
        "ended_at": moment(interaction.ended_at),
    }


def _one_run(interaction: Interaction) -> list[tuple[int, int]]:
    tokens = 0 if interaction.completion_ids is None else len(interaction.completion_ids)
    known = interaction.reason != SkipReason.UNKNOWN_WEIGHTS
    return [(interaction.version, tokens)] if tokens and known else []


def _feedback_view(row: Feedback) -> Json:
    return {
        "id": str(row.id),
        "interaction_id": str(row.interaction_id) if row.interaction_id else None,
        "metric": row.metric,
        "value": row.value,
        "final": row.final,
        "outcome": row.outcome,
        "comment": row.comment,
        "status": row.status,
        "created_at": moment(row.created_at),
    }


def moment(time: datetime | None) -> str | None:
    """ISO 8601 in UTC."""
    return None if time is None else time.isoformat()
