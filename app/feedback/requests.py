"""The body of POST /v1/feedback."""

import hashlib
from typing import Annotated

from pydantic import Field, StringConstraints

from app.body import Body
from app.db.repositories.feedback import REWARD
from app.feedback.rules import NewFeedback

Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]+$")]


class FeedbackRequest(Body):
    interaction_id: Identifier | None = None
    rollout_id: Identifier | None = None
    """Our id, or the caller's own name for the rollout."""
    reward: float | None = None
    metric: Annotated[Word, Field(max_length=64)] = REWARD
    final: bool | None = None
    outcome: Annotated[Word, Field(max_length=32)] | None = None
    comment: str | None = Field(None, max_length=16_384)
    idempotency_key: str | None = Field(None, min_length=1, max_length=128)

    def as_new_feedback(self) -> NewFeedback:
        return NewFeedback(
            rollout_id=self.rollout_id,
            interaction_id=self.interaction_id,
            value=self.reward,
            body_sha256=hashlib.sha256(self.model_dump_json().encode()).hexdigest(),
            metric=self.metric,
            final=self.final,
            outcome=self.outcome,
            comment=self.comment,
            idempotency_key=self.idempotency_key,
        )
