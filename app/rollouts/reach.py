"""Which rollouts a key reaches, and by which names."""

from uuid import UUID

from sqlalchemy.orm import Session

from app.db.models import ApiKey, Rollout
from app.db.repositories.rollouts import as_uuid, find_rollouts, rollout_of_interaction
from app.errors import Conflict, NotFound


def find_rollout(session: Session, *, key: ApiKey, policy_id: UUID | None, identifier: str) -> Rollout:
    """The rollout with this id (ours, or the client's), or with an interaction of this id, that the key may reach.

    A key reaches its own rollouts; one with `admin`, or with `feedback` but without `inference`, every rollout of its
    policies. A name that the key gave itself means its own rollout, whoever else used that name.

    Raises:
        NotFound: rollout_not_found. Conflict: rollout_ambiguous: several rollouts bear this client's id.
    """
    within = key.policy_id or policy_id
    found = find_rollouts(session, identifier, key_id=key.id, policy_id=within)
    if not found and _reaches_everyones(key):
        found = find_rollouts(session, identifier, key_id=None, policy_id=within)
    if not found and (interaction := as_uuid(identifier)) is not None:
        of_interaction = rollout_of_interaction(session, interaction)
        found = [of_interaction] if of_interaction is not None and may_reach(key, of_interaction) else []
    # a key that is bound to one policy reaches no other, whatever was asked for
    found = [rollout for rollout in found if policy_id is None or rollout.policy_id == policy_id]
    if not found:
        raise NotFound(
            f"There is no rollout {identifier!r} that this key may reach; use a reply's id, its X-Rollout-Id "
            "header, or the name that the same key gave the rollout.",
            code="rollout_not_found",
            param="rollout_id",
        )
    if len(found) > 1:
        raise Conflict(
            f"Several rollouts are named {identifier!r}; use the id from the reply's X-Rollout-Id header.",
            code="rollout_ambiguous",
            param="rollout_id",
        )
    return found[0]


def may_reach(key: ApiKey, rollout: Rollout) -> bool:
    """The rule of `find_rollout` for a rollout at hand."""
    return key.policy_id in (None, rollout.policy_id) and (_reaches_everyones(key) or rollout.key_id == key.id)


def _reaches_everyones(key: ApiKey) -> bool:
    return "admin" in key.scopes or ("feedback" in key.scopes and "inference" not in key.scopes)
