"""/admin/rollouts: rollouts by state and policy, and one rollout with its texts and tokens."""

from dataclasses import asdict
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from app.admin.pages import DEFAULT_LIMIT, Json, Limit, page, policy_id_of
from app.auth import AdminKey
from app.db.models import ApiKey, Interaction, UpdateRollout
from app.db.repositories.pages import RolloutFilter, feedback_of, full_interactions, list_rollouts, trainings_of
from app.db.repositories.rollouts import sampled
from app.feedback.endpoints import checked_identifier
from app.feedback.views import interaction_view, rollout_row, rollout_view
from app.rollouts.reach import find_rollout
from app.rollouts.states import RolloutState, SkipReason
from app.service import ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/rollouts")
async def rollouts(
    service: ServiceDep,
    key: AdminKey,
    policy: str | None = None,
    state: RolloutState | None = None,
    reason: SkipReason | None = None,
    update: UUID | None = None,
    client_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: UUID | None = None,
) -> Json:
    """Newest first, each with the versions that sampled it and how much."""

    def work(session: Session) -> Json:
        wanted = RolloutFilter(policy_id_of(session, policy), state, reason, client_id, update)
        found = list_rollouts(session, wanted, limit=limit, after=after)
        what = sampled(session, [rollout.id for rollout in found])
        return page(found, [{**rollout_row(rollout), **asdict(what[rollout.id])} for rollout in found], limit)

    return await service.read(work)


@router.get("/rollouts/{identifier}")
async def rollout(identifier: str, service: ServiceDep, key: AdminKey) -> Json:
    """Everything: texts, token ids, log-probs, and the updates that saw it."""
    return await service.read(lambda session: _whole(session, key, identifier))


def _whole(session: Session, key: ApiKey, identifier: str) -> Json:
    found = find_rollout(session, key=key, policy_id=None, identifier=checked_identifier(identifier))
    feedback = feedback_of(session, found.id)
    return {
        **rollout_view(session, found),
        "interactions": [
            {**interaction_view(interaction, feedback), **_texts_and_tokens(interaction)}
            for interaction in full_interactions(session, found.id)
        ],
        "updates": [_training(row) for row in trainings_of(session, found.id)],
    }


def _texts_and_tokens(interaction: Interaction) -> Json:
    return {
        "sampling": interaction.sampling,
        "replica": interaction.replica,
        "new_prompt_ids": interaction.new_prompt_ids.tolist(),
        "completion_ids": None if interaction.completion_ids is None else interaction.completion_ids.tolist(),
        "logprobs": None if interaction.logprobs is None else interaction.logprobs.tolist(),
        "request": None if interaction.request is None else interaction.request.decode(),
        "response": None if interaction.response is None else interaction.response.decode(),
    }


def _training(row: UpdateRollout) -> Json:
    return {
        "update_id": str(row.update_id),
        "position": row.position,
        "return": row.total_return,
        "staleness": row.staleness,
        "action_tokens": row.action_tokens,
        "advantage_mean": row.advantage_mean,
        "advantage_std": row.advantage_std,
        "masked_share": row.masked_share,
        "residual": row.residual,
    }
