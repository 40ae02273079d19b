"""What may be deleted: files of old versions and checkpoints, and bodies of old requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from app.db.models import Deployment, Interaction, Policy, PolicyVersion, Update
from app.db.repositories.deployments import WINDOW
from app.db.repositories.policies import lock_policy
from app.db.repositories.rollouts import in_state
from app.db.types import clock
from app.rollouts.states import DeploymentState, InteractionState, UpdateState, VersionStatus

VERSIONS_KEPT = {"lora": 20, "full": 3}
"""By what is trained: a version of all weights is a whole model, and engines have one of them loaded."""
CHECKPOINTS_KEPT = 3


def take_old_versions(session: Session, policy_id: UUID) -> list[PolicyVersion]:
    """Versions whose files nobody needs any more, marked as deleted; the caller deletes the files after the commit.

    Kept: the newest VERSIONS_KEPT, the live and the pinned ones, what a replica has loaded, what a running interaction
    was sent to, and version 0, which restarted replicas are checked against.
    """
    policy = lock_policy(session, policy_id)
    mine = PolicyVersion.policy_id == policy_id
    named = [number for number in (0, policy.live, policy.head) if number is not None]
    newest = select(PolicyVersion.number).where(mine).order_by(PolicyVersion.number.desc())
    newest = newest.limit(VERSIONS_KEPT[policy.training])
    in_use = select(Interaction.version).where(
        Interaction.policy_id == policy_id, in_state(Interaction.state, InteractionState.RUNNING)
    )
    # those that engines have, and are to have again after a restart, when no row says so
    window = select(PolicyVersion.number).where(
        mine, PolicyVersion.status.in_([VersionStatus.LIVE, VersionStatus.RETIRED])
    )
    window = window.order_by(PolicyVersion.number.desc()).limit(WINDOW if policy.training == "lora" else 1)
    loaded = select(Deployment.version_id).where(
        Deployment.state.in_([DeploymentState.LOADING, DeploymentState.VERIFIED])
    )
    old = list(
        session.scalars(
            select(PolicyVersion).where(
                mine,
                PolicyVersion.files_deleted_at.is_(None),
                PolicyVersion.number.not_in(named),
                PolicyVersion.number.not_in(newest),
                PolicyVersion.number.not_in(in_use),
                PolicyVersion.number.not_in(window),
                PolicyVersion.id.not_in(loaded),
                ~PolicyVersion.pinned,
            )
        )
    )
    for version in old:
        version.files_deleted_at = clock(session)
    session.flush()
    return old


@dataclass(frozen=True)
class VersionDirectories:
    """Names, not paths: they are never used twice, and stay what they are when a home is moved or mounted elsewhere."""

    kept: frozenset[str]
    """Of all versions whose files have not been deleted."""
    needed: frozenset[str]
    """Of the head and the live version. Where one is missing, the files are not those that the database speaks of."""


def version_directories(session: Session, policy_id: UUID) -> VersionDirectories:
    policy = session.get_one(Policy, policy_id)
    rows = session.execute(
        select(PolicyVersion.number, PolicyVersion.path).where(
            PolicyVersion.policy_id == policy_id, PolicyVersion.files_deleted_at.is_(None)
        )
    )
    names = {row.number: Path(row.path).name for row in rows}
    return VersionDirectories(
        kept=frozenset(names.values()),
        needed=frozenset(name for number, name in names.items() if number in (policy.head, policy.live)),
    )


def spent_checkpoints(session: Session, policy_id: UUID, found: Collection[UUID]) -> set[UUID]:
    """Those of the update ids `found` whose checkpoint is superseded: all but the last CHECKPOINTS_KEPT done ones, the
    head's, and the running update's. Ids that are no update's are not among them."""
    mine = Update.policy_id == policy_id
    done = select(Update.id).where(mine, Update.state == UpdateState.DONE).order_by(Update.started_at.desc())
    kept = set(session.scalars(done.limit(CHECKPOINTS_KEPT)))
    kept |= set(session.scalars(select(Policy.checkpoint_update_id).where(Policy.id == policy_id)))
    ended = session.scalars(select(Update.id).where(mine, Update.id.in_(found), Update.state != UpdateState.RUNNING))
    return set(ended) - kept


def clear_bodies(session: Session, after: UUID, kept_days: float, limit: int) -> UUID | None:
    """Drop request and response bytes of the oldest `limit` interactions after id `after` that are out of date.

    Ids are UUIDv7, so their order is that of time and the primary key is the index. Returns the last id looked at, for
    the next call; None: there was nothing.
    """
    before = _first_id(clock(session) - timedelta(days=kept_days))
    ids = list(
        session.scalars(
            select(Interaction.id)
            .where(
                Interaction.id > after,
                Interaction.id < before,
                or_(Interaction.request.is_not(None), Interaction.response.is_not(None)),
            )
            .order_by(Interaction.id)
            .limit(limit)
        )
    )
    if not ids:
        return None
    _forget(session, ids)
    return ids[-1]


def _forget(session: Session, ids: Sequence[UUID]) -> None:
    session.execute(update(Interaction).where(Interaction.id.in_(ids)).values(request=None, response=None))


def _first_id(at: datetime) -> UUID:
    """The smallest UUIDv7 of that time (RFC 9562: 48 bits of Unix milliseconds, then the version)."""
    return UUID(int=int(at.timestamp() * 1000) << 80 | 0x7 << 76)
