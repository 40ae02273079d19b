"""/admin/stats: how each policy's learning goes, and why the learner idles."""

from fastapi import APIRouter
from sqlalchemy.orm import Session

from app.admin.pages import Json
from app.auth import AdminKey
from app.db.repositories.policies import get_policy, list_policies
from app.db.repositories.stats import policy_stats
from app.service import ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get("/stats")
async def stats(service: ServiceDep, key: AdminKey, policy: str | None = None) -> Json:
    """By policy name: rollouts by state and reason, reward trend, updates, times, what was lost to age."""

    def work(session: Session) -> Json:
        chosen = list_policies(session) if policy is None else [get_policy(session, policy)]
        return {"policies": {each.name: policy_stats(session, each) for each in chosen}}

    return await service.read(work)
