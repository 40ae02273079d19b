"""/admin/policies: the named models, their settings and versions, learning on and off."""

import asyncio
import os
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathItem
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from sqlalchemy.orm import Session

from app.admin.pages import DEFAULT_LIMIT, Json, Limit
from app.auth import AdminKey
from app.body import Body, invalid_fields, json_body, read_object, unknown_field, validated
from app.db.models import Policy, PolicyVersion
from app.db.repositories.deployments import retry_version
from app.db.repositories.policies import create_policy, get_policy, list_policies, lock_policy, set_learning
from app.db.repositories.versions import list_versions, pin_version
from app.errors import Conflict, InvalidRequest
from app.feedback.views import moment
from app.inference.base_model import ModelAbsent, ModelUnreadable
from app.policies.learning import PAPER, LearningSettings, Training, as_training
from app.service import Service, ServiceDep

router = APIRouter(prefix="/admin", tags=["admin"])

BeforeNumber = Annotated[int, Query(ge=0, le=2**31 - 1)]
VersionNumber = Annotated[int, PathItem(ge=0, le=2**31 - 1)]

FIXED_WITH_VERSION_ZERO = ("lora_rank", "lora_alpha", "value_rank")
"""Shapes of weights that exist from version 0 on."""


class PolicyChange(Body):
    """Absent: stays as it is."""

    settings: dict[str, Any] | None = None
    """LearningSettings to change; the others stay."""
    sampling: Literal["honour", "override"] | None = None
    reward_min: float | None = None
    reward_max: float | None = None


class NewPolicy(PolicyChange):
    name: str
    base_model: str | None = None
    """A directory in Hugging Face layout; absent: the oldest policy's."""
    training: Training = "lora"
    """Adapters on a frozen base, or all weights (docs/learning.md says what that takes). Stays what it is."""


class LearningSwitch(Body):
    on: bool


class Pin(Body):
    pinned: bool


@router.get("/policies")
async def policies(service: ServiceDep, key: AdminKey) -> Json:
    """Oldest first."""
    return {"data": [_policy(policy) for policy in await service.read(list_policies)]}


@router.post("/policies", status_code=201, openapi_extra=json_body(NewPolicy))
async def create(request: Request, service: ServiceDep, key: AdminKey) -> Json:
    """A new policy on a base model that is here; it is preparing until a learn worker has made its version 0."""
    value, _ = await read_object(request)
    new = validated(NewPolicy, value)
    settings = _settings(new.settings or {}, new.training)
    base_model = await _base_model(service, new.base_model)

    def work(session: Session) -> Json:
        policy = create_policy(
            session,
            name=new.name,
            base_model=base_model,
            settings=settings,
            training=new.training,
            sampling=new.sampling or "honour",
            reward_min=-1.0 if new.reward_min is None else new.reward_min,
            reward_max=1.0 if new.reward_max is None else new.reward_max,
        )
        return _policy(policy)

    return await service.write(work, order=key.id)


@router.get("/policies/{name}")
async def policy(name: str, service: ServiceDep, key: AdminKey) -> Json:
    """One policy."""
    return _policy(await service.read(lambda session: get_policy(session, name)))


@router.patch("/policies/{name}", openapi_extra=json_body(PolicyChange))
async def change(name: str, request: Request, service: ServiceDep, key: AdminKey) -> Json:
    """Change what it learns with (from its next update on), how it samples, or the range of its rewards."""
    value, _ = await read_object(request)
    changes = validated(PolicyChange, value)
    return await service.write(lambda session: _change(session, name, changes), order=key.id)


@router.put("/policies/{name}/learning", openapi_extra=json_body(LearningSwitch))
async def learning(name: str, request: Request, service: ServiceDep, key: AdminKey) -> Json:
    """Switch learning on or off. Serving and logging go on; a running update ends as usual."""
    value, _ = await read_object(request)
    switch = validated(LearningSwitch, value)
    return _policy(await service.write(lambda session: set_learning(session, name, switch.on), order=key.id))


@router.get("/policies/{name}/versions")
async def versions(
    name: str, service: ServiceDep, key: AdminKey, limit: Limit = DEFAULT_LIMIT, before: BeforeNumber | None = None
) -> Json:
    """Newest first, of those with a number below `before`."""

    def work(session: Session) -> Json:
        found = list_versions(session, get_policy(session, name).id, limit, before)
        more = found[-1].number if len(found) == limit else None
        return {"data": [_version(version) for version in found], "next": more}

    return await service.read(work)


@router.put("/policies/{name}/versions/{number}", openapi_extra=json_body(Pin))
async def pin(name: str, number: VersionNumber, request: Request, service: ServiceDep, key: AdminKey) -> Json:
    """Pin a version: it stays loaded as `name@number` and its files stay. Or unpin it."""
    value, _ = await read_object(request)
    pinned = validated(Pin, value).pinned
    version = await service.write(
        lambda session: pin_version(session, get_policy(session, name).id, number, pinned), order=key.id
    )
    return _version(version)


@router.post("/policies/{name}/versions/{number}/retry")
async def retry(name: str, number: VersionNumber, service: ServiceDep, key: AdminKey) -> Json:
    """Try to deploy a rejected version again; if it was the head, learning goes on."""
    version = await service.write(
        lambda session: retry_version(session, get_policy(session, name).id, number), order=key.id
    )
    return _version(version)


def _change(session: Session, name: str, changes: PolicyChange) -> Json:
    policy = lock_policy(session, get_policy(session, name).id)
    if changes.settings is not None:
        # a setting that another release knew must not stand in the way of a change
        kept = {name: value for name, value in policy.settings.items() if name in LearningSettings.model_fields}
        if "preset" in changes.settings:  # what a preset sets comes from the new one
            kept = {name: value for name, value in kept.items() if name not in PAPER}
        merged = _settings({**kept, **changes.settings}, as_training(policy.training)).model_dump(mode="json")
        for fixed in FIXED_WITH_VERSION_ZERO:
            if policy.head is not None and merged[fixed] != policy.settings[fixed]:
                raise Conflict(
                    f"'{fixed}' shapes weights that exist already: create another policy with it.",
                    code="setting_fixed",
                    param=f"settings.{fixed}",
                )
        policy.settings = merged
    policy.sampling = changes.sampling or policy.sampling
    if changes.reward_min is not None or changes.reward_max is not None:
        low = policy.reward_min if changes.reward_min is None else changes.reward_min
        high = policy.reward_max if changes.reward_max is None else changes.reward_max
        if low >= high:
            raise InvalidRequest(
                f"The reward range [{low:g}, {high:g}] is empty: reward_min must be below reward_max.",
                code="invalid_reward_range",
                param="reward_min",
            )
        policy.reward_min, policy.reward_max = low, high
    session.flush()
    return _policy(policy)


def _settings(value: dict[str, Any], training: Training) -> LearningSettings:
    try:
        return LearningSettings.model_validate(value, context={"training": training})
    except ValidationError as error:
        errors = [{**each, "loc": ("settings", *each["loc"])} for each in error.errors(include_url=False)]
        located = cast(list[ErrorDetails], errors)
        raise unknown_field(located, LearningSettings) or invalid_fields(located, {"settings": value}) from None


async def _base_model(service: Service, directory: str | None) -> str:
    """The directory as it is stored. One that the gateway could not serve afterwards is refused. InvalidRequest."""
    known = await service.read(list_policies)
    if directory is None and known:
        return known[0].base_model
    try:
        if directory is None:
            raise ModelAbsent("there is no policy yet whose base model could be used")
        resolved = await asyncio.to_thread(os.path.realpath, directory)
        await service.renderers.load(resolved)
    except ModelUnreadable as error:
        raise InvalidRequest(
            "'base_model' must be a directory on this machine that holds a model in Hugging Face layout, with a "
            f"tokenizer.json: {error}.",
            code="invalid_value",
            param="base_model",
        ) from None
    return resolved


def _policy(policy: Policy) -> Json:
    return {
        "id": str(policy.id),
        "name": policy.name,
        "base_model": policy.base_model,
        "training": policy.training,
        "sampling": policy.sampling,
        "reward_min": policy.reward_min,
        "reward_max": policy.reward_max,
        "live": policy.live,
        "head": policy.head,
        "learning": policy.learning,
        "idle_reason": policy.idle_reason,
        "learner_seen_at": moment(policy.learner_seen_at),
        "updates_done": policy.updates_done,
        "settings": policy.settings,
        "created_at": moment(policy.created_at),
    }


def _version(version: PolicyVersion) -> Json:
    return {
        "number": version.number,
        "parent": version.parent,
        "update_id": str(version.update_id) if version.update_id else None,
        "adapter_name": version.adapter_name,
        "path": version.path,
        "sha256": version.sha256,
        "status": version.status,
        "pinned": version.pinned,
        "deploy_attempts": version.deploy_attempts,
        "live_at": moment(version.live_at),
        "files_deleted_at": moment(version.files_deleted_at),
        "created_at": moment(version.created_at),
    }
