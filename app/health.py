"""/healthz: the process is sound. /readyz: a request would be served, or what is missing."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.responses import JSONResponse, Response

from app.db.repositories.serving import served_policies, serving_counts
from app.service import ServiceDep

router = APIRouter(tags=["health"])


WRITER_DIED = "the thread that writes to the database has ended: restart this process (its log says why)"


@router.get("/healthz")
async def healthz(service: ServiceDep) -> Response:
    """200 while the process is up; 503 when only a restart helps."""
    if service.writer.died:
        return JSONResponse({"status": "failed", "missing": WRITER_DIED}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(service: ServiceDep) -> Response:
    """200 when at least one policy is live on a healthy engine; else 503 with what is missing."""
    if service.writer.died:
        return JSONResponse({"status": "not ready", "missing": WRITER_DIED}, 503)
    try:
        ready, answer = await service.read(_readiness)
    except SQLAlchemyError as error:
        ready, answer = False, {"status": "not ready", "missing": f"the database does not answer: {error}"}
    return JSONResponse(answer, 200 if ready else 503)


def _readiness(session: Session) -> tuple[bool, dict[str, Any]]:
    served = served_policies(session)
    if served:
        return True, {"status": "ok", "policies": served}
    return False, {"status": "not ready", "missing": _missing(session)}


def _missing(session: Session) -> str:
    counts = serving_counts(session)
    if not counts.policies:
        return "there is no policy: run `evergreen prepare`, or `evergreen up`, which does it first"
    if not counts.healthy_replicas:
        return "no engine is healthy: see /admin/replicas; a control worker must run to find one"
    if not counts.live_policies:
        return "no policy has a live version yet: the first one is being deployed"
    return "no healthy engine has a live version loaded yet: see /admin/replicas"
