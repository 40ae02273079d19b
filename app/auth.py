"""API keys at the door: Bearer secrets, of which only hashes are stored, and their scopes."""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from app.db.models import ApiKey, Policy
from app.db.repositories.keys import Scope, find_key
from app.errors import Forbidden, Unauthorized
from app.service import Service, ServiceDep

KEY_CACHE_S = 2.0
"""A revoked key is refused at the latest after this long."""
MAX_CACHED_KEYS = 4096

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class KeyCache:
    """Keys by secret, for KEY_CACHE_S each. Unknown secrets are not kept."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, ApiKey]] = {}

    async def find(self, service: Service, secret: str) -> ApiKey:
        """Raises Unauthorized for a secret that belongs to no key, or to a revoked one."""
        now = time.monotonic()
        cached = self._keys.get(secret)
        if cached is not None and cached[0] > now:
            return cached[1]
        self._keys.pop(secret, None)
        key = await service.read(lambda session: find_key(session, secret))
        if key is None:
            raise Unauthorized(
                "This API key is unknown or revoked: use another one, or create one with POST /admin/keys.",
                code="invalid_api_key",
                headers=_CHALLENGE,
            )
        if len(self._keys) >= MAX_CACHED_KEYS:
            self._keys.clear()
        self._keys[secret] = (now + KEY_CACHE_S, key)
        return key


def _require(*scopes: Scope) -> Callable[[Request, Service], Awaitable[ApiKey]]:
    async def authorised(request: Request, service: ServiceDep) -> ApiKey:
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        secret = secret.strip()
        if kind.lower() != "bearer" or not secret:
            raise Unauthorized(
                "No API key was sent: add the header 'Authorization: Bearer YOUR_KEY'.",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        cache: KeyCache = request.app.state.keys
        key = await cache.find(service, secret)
        if not any(scope in key.scopes for scope in scopes):
            needed = " or ".join(f"'{scope}'" for scope in scopes)
            raise Forbidden(f"This API key lacks the scope {needed}: use a key that has it.", code="insufficient_scope")
        return key

    return authorised


InferenceKey = Annotated[ApiKey, Depends(_require("inference"))]
FeedbackKey = Annotated[ApiKey, Depends(_require("feedback"))]
AdminKey = Annotated[ApiKey, Depends(_require("admin"))]
AgentKey = Annotated[ApiKey, Depends(_require("inference", "feedback"))]
"""Who plays a rollout, or judges it."""


def may_use(key: ApiKey, policy: Policy) -> bool:
    """A key may be bound to one policy."""
    return key.policy_id is None or key.policy_id == policy.id
