"""/admin/replicas and /admin/events: the engines, and what happened that an operator should know."""

from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.orm import Session

from app.admin.pages import DEFAULT_LIMIT, Json, Limit, page
from app.auth import AdminKey
from app.db.repositories.events import list_events
from app.db.repositories.pages import replicas_with_deployments
from app.feedback.views import moment
from app.service import ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/replicas")
async def replicas(service: ServiceDep, key: AdminKey) -> Json:
    """Each engine with its health and what it has loaded, canary figures included."""
    return {"data": await service.read(_replicas)}


@router.get("/events")
async def events(service: ServiceDep, key: AdminKey, limit: Limit = DEFAULT_LIMIT, after: UUID | None = None) -> Json:
    """Newest first."""
    found = await service.read(lambda session: list_events(session, limit, after))
    shown = [
        {
            "id": str(event.id),
            "at": moment(event.at),
            "kind": event.kind,
            "policy_id": str(event.policy_id) if event.policy_id else None,
            "message": event.message,
            "data": event.data,
        }
        for event in found
    ]
    return page(found, shown, limit)


def _replicas(session: Session) -> list[Json]:
    return [
        {
            "id": str(replica.id),
            "url": replica.url,
            "healthy": replica.healthy,
            "removed": replica.removed,
            "error": replica.error,
            "base_model": replica.base_model,
            "weights": replica.weights,
            "swap_began_at": moment(replica.swap_began_at),
            "seen_at": moment(replica.seen_at),
            "deployments": [
                {
                    "adapter_name": version.adapter_name,
                    "policy_id": str(version.policy_id),
                    "version": version.number,
                    "state": deployment.state,
                    "verdict": deployment.verdict,
                    "score": deployment.score,
                    "distance": deployment.distance,
                    "paused_ms": deployment.paused_ms,
                    "closed_ms": deployment.closed_ms,
                    "error": deployment.error,
                    "loaded_at": moment(deployment.loaded_at),
                }
                for deployment, version in deployments
            ],
        }
        for replica, deployments in replicas_with_deployments(session)
    ]
