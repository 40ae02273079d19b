"""The `model` of a request -> the policy, the pinned version if any, and the renderer of its base model."""

import re
from dataclasses import dataclass

from sqlalchemy.orm import Session

from app.auth import may_use
from app.db.models import ApiKey, Policy
from app.db.repositories.policies import get_policy
from app.db.repositories.replicas import RouteRow
from app.engine.replicas import WeightsSwapping, candidates
from app.errors import ApiError, Forbidden, NotFound
from app.inference.render import ChatRenderer
from app.service import Service

_PINNED = re.compile(r"(?P<policy>[^@]+)@(?P<version>[0-9]{1,9})")


@dataclass(frozen=True)
class Target:
    policy: Policy
    number: int | None
    """A pinned version; None: the live one at the time."""
    routes: list[RouteRow]
    """Replicas that serve it now."""
    renderer: ChatRenderer


async def find_target(service: Service, key: ApiKey, model: str) -> Target:
    """
    Args:
        model: a policy's name, or `name@version`.

    Raises:
        NotFound: model_not_found. Forbidden: the key is bound to another policy. And what Router.pick and
            Renderers.get raise.
    """
    name, number = policy_and_number(model)
    policy, routes = await service.read(lambda session: _policy_and_routes(session, key, name, number))
    if isinstance(routes, WeightsSwapping):
        routes = await service.router.rows(policy.id, number)
    renderer = await service.renderers.get(policy.base_model)
    if isinstance(routes, ApiError):  # only now: what cannot be read will never be loaded either, and says more
        raise routes
    return Target(policy, number, routes, renderer)


def policy_and_number(model: str) -> tuple[str, int | None]:
    """The policy's name and the pinned version's number, if any. NotFound for what is neither."""
    pinned = _PINNED.fullmatch(model)
    if pinned is not None:
        return pinned["policy"], int(pinned["version"])
    if "@" in model:
        raise NotFound(
            f"The model {model!r} does not exist: a version is pinned as NAME@NUMBER, such as default@3.",
            code="model_not_found",
            param="model",
        )
    return model, None


def _policy_and_routes(
    session: Session, key: ApiKey, name: str, number: int | None
) -> tuple[Policy, list[RouteRow] | ApiError]:
    """The policy, and its routes or why it has none."""
    policy = get_policy(session, name)
    if not may_use(key, policy):
        raise Forbidden(
            f"This API key may not use the model {name!r}: GET /v1/models lists those that it may use.",
            code="policy_not_allowed",
            param="model",
        )
    try:
        return policy, candidates(session, policy.id, number)
    except ApiError as nothing_loaded:
        return policy, nothing_loaded
