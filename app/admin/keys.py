"""/admin/keys: API keys. A secret is shown once, when its key is made."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import Field
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.admin.pages import Json
from app.auth import KEY_CACHE_S, AdminKey
from app.body import Body, json_body, read_object, validated
from app.db.models import ApiKey
from app.db.repositories.keys import create_key, list_keys, revoke_key
from app.feedback.views import moment
from app.service import ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])


class NewKey(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    scopes: list[str]
    """inference, feedback, admin."""
    policy: str | None = None
    """The only policy it may use; absent: every policy. Not together with the scope admin."""


@router.get("/keys")
async def keys(service: ServiceDep, key: AdminKey) -> Json:
    """All keys, revoked ones included; never their secrets."""
    return {"data": [_key(row) for row in await service.read(list_keys)]}


@router.post("/keys", status_code=201, openapi_extra=json_body(NewKey))
async def create(request: Request, service: ServiceDep, key: AdminKey) -> Json:
    """A new key. `secret` is in this answer and nowhere else."""
    value, _ = await read_object(request)
    new = validated(NewKey, value)

    def work(session: Session) -> Json:
        row, secret = create_key(session, name=new.name, scopes=new.scopes, policy=new.policy)
        return {**_key(row), "secret": secret}

    return await service.write(work, order=uuid7())


@router.delete("/keys/{key_id}")
async def revoke(key_id: UUID, service: ServiceDep, key: AdminKey) -> Json:
    """Refuse the key from now on."""
    row = await service.write(lambda session: revoke_key(session, key_id), order=key_id)
    return {**_key(row), "message": f"Every app process refuses the key within {KEY_CACHE_S:g} s."}


def _key(row: ApiKey) -> Json:
    return {
        "id": str(row.id),
        "name": row.name,
        "prefix": row.prefix,
        "scopes": row.scopes,
        "policy_id": str(row.policy_id) if row.policy_id else None,
        "created_at": moment(row.created_at),
        "revoked_at": moment(row.revoked_at),
    }
