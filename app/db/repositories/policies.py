"""Policies: the named learning models."""

import re
from typing import Literal
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.db.models import Policy
from app.errors import Conflict, InvalidRequest, NotFound
from app.policies.learning import LearningSettings

# a folder name, an adapter name and half of `name@version`
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def get_policy(session: Session, name: str) -> Policy:
    """
    Raises:
        NotFound: model_not_found, as OpenAI's API names it.
    """
    policy = session.scalar(select(Policy).where(Policy.name == name)) if _NAME.fullmatch(name) else None
    if policy is None:
        raise NotFound(
            f"The model {name!r} does not exist; GET /v1/models lists those that do.",
            code="model_not_found",
            param="model",
        )
    return policy


def list_policies(session: Session) -> list[Policy]:
    """All policies, oldest first."""
    return list(session.scalars(select(Policy).order_by(Policy.id)))


def create_policy(
    session: Session,
    *,
    name: str,
    base_model: str,
    settings: LearningSettings,
    training: Literal["lora", "full"] = "lora",
    sampling: Literal["honour", "override"] = "honour",
    reward_min: float = -1.0,
    reward_max: float = 1.0,
) -> Policy:
    """Store a new policy; it answers policy_preparing until its version 0 is written.

    Raises:
        InvalidRequest: the name cannot be used, or the reward range is empty. Conflict: the name is taken, or the base
            model cannot be shared (one policy that trains all weights has its engines to itself).
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "a policy's name has 1 to 64 letters, digits, '.', '_' or '-' and starts with a letter or digit",
            code="invalid_name",
            param="name",
        )
    if not float("-inf") < reward_min < reward_max < float("inf"):
        raise InvalidRequest(
            f"the reward range [{reward_min}, {reward_max}] must be finite and its minimum below its maximum",
            code="invalid_reward_range",
            param="reward_min",
        )
    _check_base_is_free(session, base_model, training)
    policy = Policy(
        name=name,
        base_model=base_model,
        settings=settings.model_dump(mode="json"),
        training=training,
        sampling=sampling,
        reward_min=reward_min,
        reward_max=reward_max,
    )
    try:
        with session.begin_nested():
            session.add(policy)
    except IntegrityError:
        message = f"a policy named {name!r} exists; choose another name"
        raise Conflict(message, code="policy_exists", param="name") from None
    return policy


def _check_base_is_free(session: Session, base_model: str, training: str) -> None:
    others = session.scalars(select(Policy).where(Policy.base_model == base_model).order_by(Policy.id)).all()
    whole = next((policy for policy in others if policy.training == "full"), None)
    taken_by = others[0] if training == "full" and others else whole
    if taken_by is None:
        return
    raise Conflict(
        f"The policy {taken_by.name!r} uses the base model {base_model} already, and a policy that trains all weights "
        "has its engines to itself. Give one of the two a copy of the model in another directory, and an engine of its "
        "own that is started on it; or train adapters (training: lora), which share a base model.",
        code="base_model_not_shareable",
        param="base_model",
    )


def set_learning(session: Session, name: str, on: bool) -> Policy:
    """Let the learner claim this policy's rollouts, or not. A running update ends as usual.

    Raises:
        NotFound: model_not_found.
    """
    policy = lock_policy(session, get_policy(session, name).id)
    policy.learning = on
    session.flush()
    return policy


def lock_policy(session: Session, policy_id: UUID) -> Policy:
    """The policy's row, locked until the transaction ends and read afresh.

    FOR NO KEY UPDATE: rows that refer to the policy can still be inserted meanwhile.
    """
    return session.execute(
        select(Policy)
        .where(Policy.id == policy_id)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).scalar_one()
