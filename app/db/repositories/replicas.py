"""Engine replicas: which exist, whether they answer, who is at work on them, and what can be routed to them."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.db.models import Deployment, Policy, PolicyVersion, Replica
from app.db.repositories.events import add_event
from app.db.types import clock, db_now
from app.policies.bases import is_same_base
from app.rollouts.states import DeploymentState


@dataclass(frozen=True)
class RouteRow:
    version: int
    adapter_name: str
    url: str
    own_weights: bool = False
    """The version is the engine's own weights, not an adapter."""


def routes(session: Session, policy_id: UUID, number: int | None) -> list[RouteRow]:
    """Healthy replicas on which version `number` (None: the live one) is verified, and what it is called there.

    An engine whose own weights are swapped has one version: while the replicas are swapped one after the other, those
    that are ahead of the live version answer for it.
    """
    full = Policy.training == "full"
    query = (
        select(PolicyVersion.number, PolicyVersion.adapter_name, Replica.url, full)
        .join(Policy, Policy.id == PolicyVersion.policy_id)
        .join(Deployment, Deployment.version_id == PolicyVersion.id)
        .join(Replica, Replica.id == Deployment.replica_id)
        .where(
            PolicyVersion.policy_id == policy_id,
            Deployment.state == DeploymentState.VERIFIED,
            Replica.healthy,
            ~Replica.removed,
            Replica.swap_began_at.is_(None),
        )
        .order_by(Replica.url)
    )
    if number is None:
        query = query.where((PolicyVersion.number == Policy.live) | (full & (PolicyVersion.number > Policy.live)))
    else:
        query = query.where(PolicyVersion.number == number)
    return [RouteRow(*row) for row in session.execute(query)]


def sync_replicas(session: Session, urls: Sequence[str]) -> None:
    """Make the rows those of `urls`: new ones are added, others marked removed."""
    rows = {row.url: row for row in session.scalars(select(Replica))}
    for url in urls:
        if url not in rows:
            with suppress(IntegrityError), session.begin_nested():  # another process may add it at the same time
                session.add(Replica(url=url))
        elif rows[url].removed:
            rows[url].removed = False
    for url, row in rows.items():
        if url not in urls and not row.removed:
            row.removed, row.healthy = True, False


def active_replicas(session: Session) -> list[Replica]:
    return list(session.scalars(select(Replica).where(~Replica.removed).order_by(Replica.url)))


def replicas_for(session: Session, base_model: str) -> list[Replica]:
    """Active replicas that serve this base model, as far as they have said which."""
    return [replica for replica in active_replicas(session) if is_same_base(replica.base_model, base_model)]


def is_unserved(session: Session, base_model: str) -> bool:
    """Whether there are replicas, and every one of them serves another base model."""
    return bool(active_replicas(session)) and not replicas_for(session, base_model)


def take_replica(session: Session, replica_id: UUID, owner: str, ttl_s: float) -> bool:
    """Own a replica until `ttl_s` from now, or for as long again. False: another process is at work on it."""
    now = clock(session)
    mine_or_free = (Replica.owner == owner) | Replica.owned_until.is_(None) | (Replica.owned_until < now)
    taken = session.execute(
        update(Replica)
        .where(Replica.id == replica_id, mine_or_free)
        .values(owner=owner, owned_until=now + timedelta(seconds=ttl_s))
        .returning(Replica.id)
    )
    return taken.first() is not None


def release_replica(session: Session, replica_id: UUID, owner: str) -> None:
    session.execute(
        update(Replica).where(Replica.id == replica_id, Replica.owner == owner).values(owner=None, owned_until=None)
    )


def note_reachable(
    session: Session, replica_id: UUID, base_model: str | None, loaded: Collection[str], weights: str | None = None
) -> None:
    """It answered, with these adapters loaded and the label `weights`, which counts as one. What it lost (it was
    restarted) is no longer deployed there."""
    session.execute(
        update(Replica)
        .where(Replica.id == replica_id)
        .values(healthy=True, error=None, seen_at=db_now(), base_model=base_model, weights=weights)
    )
    lost = session.execute(
        select(Deployment.id, PolicyVersion.adapter_name)
        .join(PolicyVersion, PolicyVersion.id == Deployment.version_id)
        .where(Deployment.replica_id == replica_id, Deployment.state == DeploymentState.VERIFIED)
    )
    gone = [row.id for row in lost if row.adapter_name not in loaded and row.adapter_name != weights]
    if gone:
        session.execute(
            update(Deployment)
            .where(Deployment.id.in_(gone))
            .values(state=DeploymentState.UNLOADED, updated_at=db_now())
        )


def note_unreachable(session: Session, replica_id: UUID, error: str, *, grace_s: float) -> None:
    """It did not answer. It stays healthy for `grace_s` after its last sign of life (a busy engine answers late)."""
    replica = session.get_one(Replica, replica_id, with_for_update=True)
    replica.error = error
    silent = replica.seen_at is None or clock(session) - replica.seen_at > timedelta(seconds=grace_s)
    if silent and replica.healthy:
        replica.healthy = False
        add_event(session, "replica_unhealthy", f"{replica.url}: {error}")
