"""Policy versions: immutable weights, numbered without a gap, and the chain of their parents."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import func, literal, select
from sqlalchemy.orm import Session, aliased

from app.db.models import PolicyVersion
from app.db.repositories.policies import lock_policy
from app.errors import Conflict, NotFound
from app.rollouts.states import VersionStatus


@dataclass(frozen=True)
class NewVersion:
    """Files that are in place already; committing the row makes them a version."""

    adapter_name: str
    path: str
    sha256: str
    probe: list[Any] | None = None
    """Per probe position the learner's top 20 at T=1: [[token, log-prob], ...]."""


def get_version(session: Session, policy_id: UUID, number: int) -> PolicyVersion | None:
    return session.scalar(
        select(PolicyVersion).where(PolicyVersion.policy_id == policy_id, PolicyVersion.number == number)
    )


def list_versions(
    session: Session, policy_id: UUID, limit: int = 100, before: int | None = None
) -> list[PolicyVersion]:
    """Newest first, at most `limit`, of those with a number below `before`."""
    query = select(PolicyVersion).where(PolicyVersion.policy_id == policy_id)
    if before is not None:
        query = query.where(PolicyVersion.number < before)
    return list(session.scalars(query.order_by(PolicyVersion.number.desc()).limit(limit)))


def add_version_zero(session: Session, policy_id: UUID, *, path: str, sha256: str, adapter_name: str) -> PolicyVersion:
    """Version 0, the policy's first head. Where it exists already it is returned as it is."""
    policy = lock_policy(session, policy_id)
    existing = get_version(session, policy_id, 0)
    if existing is not None:
        return existing
    version = PolicyVersion(policy_id=policy_id, number=0, path=path, sha256=sha256, adapter_name=adapter_name)
    session.add(version)
    policy.head = 0
    session.flush()
    return version


def append_version(
    session: Session, policy_id: UUID, new: NewVersion, *, parent: int, update_id: UUID
) -> PolicyVersion:
    """The next number, under the policy's lock, which the caller holds. The caller moves the head."""
    newest = session.execute(
        select(func.max(PolicyVersion.number)).where(PolicyVersion.policy_id == policy_id)
    ).scalar_one()
    version = PolicyVersion(
        policy_id=policy_id,
        number=newest + 1,
        parent=parent,
        update_id=update_id,
        adapter_name=new.adapter_name,
        path=new.path,
        sha256=new.sha256,
        probe=new.probe,
    )
    session.add(version)
    session.flush()
    return version


def pin_version(session: Session, policy_id: UUID, number: int, pinned: bool) -> PolicyVersion:
    """Keep a version's files and keep it loaded, or no longer.

    Raises:
        NotFound: there is no such version, or its files are gone. Conflict: it is rejected, which keeps it from being
            loaded.
    """
    lock_policy(session, policy_id)  # retention decides under the same lock which files go
    version = get_version(session, policy_id, number)
    if version is None or (pinned and version.files_deleted_at is not None):
        raise NotFound(
            f"Version {number} {'does not exist' if version is None else 'has been deleted'}; "
            "GET /admin/policies/NAME/versions lists those that can be pinned.",
            code="version_not_found",
            param="version",
        )
    if pinned and version.status == VersionStatus.REJECTED:
        raise Conflict(
            f"Version {number} was rejected, and no engine loads it: /admin/events says why. Once the cause is gone, "
            f"POST /admin/policies/NAME/versions/{number}/retry, and pin it when it has been live.",
            code="version_rejected",
            param="version",
        )
    version.pinned = pinned
    session.flush()
    return version


def parent_chain(
    session: Session, policy_id: UUID, head: int, *, back_to: int = 0, max_steps: int | None = None
) -> dict[int, int]:
    """Policy steps from each version on the head's parent chain to the head.

    Args:
        back_to: the walk ends at the first number that is not above this one.
        max_steps: it ends after this many steps.

    Returns:
        {version number: steps >= 0}. A number from `back_to` on that is missing lies off the chain.
    """
    version = aliased(PolicyVersion)
    chain = (
        select(version.number, version.parent, literal(0).label("steps"))
        .where(version.policy_id == policy_id, version.number == head)
        .cte("chain", recursive=True)
    )
    older = select(PolicyVersion.number, PolicyVersion.parent, chain.c.steps + 1).where(
        PolicyVersion.policy_id == policy_id, PolicyVersion.number == chain.c.parent, chain.c.number > back_to
    )
    if max_steps is not None:
        older = older.where(chain.c.steps < max_steps)
    chain = chain.union_all(older)
    return {row.number: row.steps for row in session.execute(select(chain.c.number, chain.c.steps))}
