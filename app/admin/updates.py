"""/admin/updates: what the learner did, with its health figures and the rollouts it used."""

from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.orm import Session

from app.admin.pages import DEFAULT_LIMIT, Json, Limit, page, policy_id_of
from app.auth import AdminKey
from app.db.models import Update
from app.db.repositories.pages import list_updates
from app.db.repositories.updates import update_rollouts
from app.errors import NotFound
from app.feedback.views import moment
from app.service import ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/updates")
async def updates(
    service: ServiceDep,
    key: AdminKey,
    policy: str | None = None,
    limit: Limit = DEFAULT_LIMIT,
    after: UUID | None = None,
) -> Json:
    """Newest first."""

    def work(session: Session) -> Json:
        found = list_updates(session, policy_id_of(session, policy), limit=limit, after=after)
        return page(found, [_update(update) for update in found], limit)

    return await service.read(work)


@router.get("/updates/{update_id}")
async def update(update_id: UUID, service: ServiceDep, key: AdminKey) -> Json:
    """One update, and what each of its rollouts gave."""

    def work(session: Session) -> Json:
        found = session.get(Update, update_id)
        if found is None:
            raise NotFound(f"There is no update {update_id}: GET /admin/updates lists them.", code="update_not_found")
        rows = [
            {
                "rollout_id": str(row.rollout_id),
                "return": row.total_return,
                "staleness": row.staleness,
                "action_tokens": row.action_tokens,
                "advantage_mean": row.advantage_mean,
                "advantage_std": row.advantage_std,
                "masked_share": row.masked_share,
                "residual": row.residual,
            }
            for row in update_rollouts(session, update_id)
        ]
        return {**_update(found), "settings": found.settings, "provenance": found.provenance, "rollouts": rows}

    return await service.read(work)


def _update(update: Update) -> Json:
    return {
        "id": str(update.id),
        "policy_id": str(update.policy_id),
        "state": update.state,
        "owner": update.owner,
        "base_version": update.base_version,
        "version": update.version,
        "health": update.health,
        "seconds": update.seconds,
        "error": update.error,
        "started_at": moment(update.started_at),
        "ended_at": moment(update.ended_at),
    }
