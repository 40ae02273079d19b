"""/v1/feedback, and a rollout as its caller sees it."""

from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.auth import AgentKey, FeedbackKey
from app.body import json_body, read_object, validated
from app.db.models import ApiKey
from app.db.repositories.rollouts import as_uuid
from app.errors import InvalidRequest
from app.feedback.requests import FeedbackRequest
from app.feedback.rules import apply_feedback
from app.feedback.views import rollout_view
from app.inference.labels import IDENTIFIER
from app.rollouts.lifecycle import close_rollout
from app.rollouts.reach import find_rollout
from app.service import ServiceDep

router = APIRouter(prefix="/v1", tags=["feedback"])


@router.post("/feedback", openapi_extra=json_body(FeedbackRequest))
async def feedback(request: Request, service: ServiceDep, key: FeedbackKey) -> dict[str, Any]:
    """Reward an interaction or a rollout; the answer says what became of the rollout and why."""
    value, _ = await read_object(request)
    new = validated(FeedbackRequest, value).as_new_feedback()
    order = _order(new.rollout_id or new.interaction_id)
    return await service.write(lambda session: apply_feedback(session, key, new), order=order)


@router.post("/rollouts/{identifier}/close")
async def close(identifier: str, service: ServiceDep, key: AgentKey) -> dict[str, Any]:
    """No more calls or rewards are to come: train the rollout, or skip it for want of a reward."""

    def work(session: Session) -> dict[str, Any]:
        rollout = find_rollout(session, key=key, policy_id=None, identifier=checked_identifier(identifier))
        close_rollout(session, rollout)
        return rollout_view(session, rollout)

    return await service.write(work, order=_order(identifier))


@router.get("/rollouts/{identifier}")
async def rollout(identifier: str, service: ServiceDep, key: AgentKey) -> dict[str, Any]:
    """A rollout's state, its interactions and rewards, and why something is not trained."""
    return await service.read(lambda session: _view(session, key, identifier))


def _view(session: Session, key: ApiKey, identifier: str) -> dict[str, Any]:
    found = find_rollout(session, key=key, policy_id=None, identifier=checked_identifier(identifier))
    return rollout_view(session, found)


def checked_identifier(identifier: str) -> str:
    """Raises InvalidRequest for what is no rollout's id or name."""
    if not IDENTIFIER.fullmatch(identifier):
        raise InvalidRequest(
            "A rollout is named by the UUID from its X-Rollout-Id header, or by your own name for it: 1 to 128 "
            "letters, digits, '.', '_', ':' or '-'.",
            code="invalid_rollout_id",
            param="rollout_id",
        )
    return identifier


def _order(identifier: str | None) -> UUID:
    """The writer sorts its group by rollout id; for a caller's own name there is none yet."""
    return (as_uuid(identifier) if identifier else None) or uuid7()
