"""API keys: only their SHA-256 is stored."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Literal, get_args
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import ApiKey
from app.db.repositories.policies import get_policy
from app.db.types import clock
from app.errors import Conflict, InvalidRequest, NotFound

Scope = Literal["inference", "feedback", "admin"]
SCOPES: tuple[str, ...] = get_args(Scope)


def create_key(
    session: Session, *, name: str, scopes: Sequence[str], policy: str | None = None, secret: str | None = None
) -> tuple[ApiKey, str]:
    """Store a new key and return it with its secret, which cannot be read again.

    Args:
        policy: the only policy it may use; None = every policy.
        secret: a secret that exists already, such as the one in admin.key. Storing it twice gives the same row.

    Raises:
        InvalidRequest: no scope, an unknown one, or `admin` for one policy only. NotFound: no such policy.
        Conflict: the secret was revoked.
    """
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        problem = f"unknown scope {unknown[0]!r}" if unknown else "a key without a scope can do nothing"
        raise InvalidRequest(
            f"{problem}; give one or more of {', '.join(SCOPES)}", code="invalid_scopes", param="scopes"
        )
    if policy is not None and "admin" in scopes:
        raise InvalidRequest(
            "a key with the scope 'admin' reaches every policy and makes keys, so it cannot be bound to one; leave out "
            "'policy', or make a key with 'inference' and 'feedback' only",
            code="invalid_scopes",
            param="policy",
        )
    if not name or len(name) > 128:
        raise InvalidRequest("a key's name has 1 to 128 characters", code="invalid_name", param="name")
    if secret is not None:
        existing = session.scalar(select(ApiKey).where(ApiKey.hash == _hash(secret)))
        if existing is not None and existing.revoked_at is not None:
            raise Conflict("this key was revoked; create a new one", code="key_revoked")
        if existing is not None:
            return existing, secret
    secret = secret or f"eg-{secrets.token_urlsafe(32)}"
    key = ApiKey(
        name=name,
        hash=_hash(secret),
        prefix=secret[:8],
        scopes=[scope for scope in SCOPES if scope in scopes],
        policy_id=get_policy(session, policy).id if policy is not None else None,
    )
    session.add(key)
    session.flush()
    return key, secret


def find_key(session: Session, secret: str) -> ApiKey | None:
    """The key with this secret, unless it was revoked."""
    return session.scalar(select(ApiKey).where(ApiKey.hash == _hash(secret), ApiKey.revoked_at.is_(None)))


def revoke_key(session: Session, key_id: UUID) -> ApiKey:
    """Refuse the key from now on; its rollouts stay. Revoking twice changes nothing.

    Raises:
        NotFound: no such key.
    """
    key = session.get(ApiKey, key_id)
    if key is None:
        raise NotFound(f"there is no key {key_id}; list them with GET /admin/keys", code="key_not_found")
    if key.revoked_at is None:
        key.revoked_at = clock(session)
        session.flush()
    return key


def list_keys(session: Session) -> list[ApiKey]:
    """All keys, newest first, revoked ones included."""
    return list(session.scalars(select(ApiKey).order_by(ApiKey.id.desc())))


def _hash(secret: str) -> str:
    # surrogates cannot be encoded; such a secret matches no key
    return hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).hexdigest()
