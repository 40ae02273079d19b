"""/admin: what an operator reads and changes. Every path needs a key with the scope `admin`."""

from fastapi import APIRouter

from app.admin import fleet, keys, policies, rollouts, stats, updates

router = APIRouter(prefix="/admin", tags=["admin"])
for part in (stats, rollouts, updates, policies, keys, fleet):
    router.include_router(part.router)
