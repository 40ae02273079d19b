"""What engines should have loaded, what they have, and which version is live."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from app.db.models import Deployment, Policy, PolicyVersion, Replica
from app.db.repositories.events import add_event
from app.db.repositories.policies import lock_policy
from app.db.repositories.replicas import replicas_for
from app.db.types import clock, db_now
from app.errors import Conflict, NotFound
from app.policies.bases import is_same_base
from app.rollouts.states import DeploymentState, VersionStatus

WINDOW = 8
"""So many versions that have been live stay loaded on every replica, besides the pinned ones."""


@dataclass(frozen=True)
class Wanted:
    """What one policy wants loaded on every replica of its base model; detached rows."""

    policy_id: UUID
    probes: list[list[int]] | None
    """The canary's prompts; None until the policy's first batch."""
    live: PolicyVersion | None
    candidate: PolicyVersion | None
    """The newest one that was neither deployed nor rejected yet."""
    others: list[PolicyVersion]
    """The window of versions that have been live, and the pinned ones; newest first, without the two above."""
    zero: PolicyVersion | None
    """Version 0: the canary's reference where the live version is not verified yet."""
    own_weights: bool = False
    """All weights are trained: the engine has one version at a time, as its own weights."""


def wanted(session: Session, base_model: str | None) -> list[Wanted]:
    """Per policy that has a version and can be served on a replica whose base model is this one.

    One that trains all weights must be alone there: beside others it is left out (see `crowded_policies`).
    """
    found = [
        _wanted(session, policy)
        for policy in session.scalars(select(Policy).where(Policy.head.is_not(None)).order_by(Policy.name))
        if is_same_base(base_model, policy.base_model)
    ]
    return found if len(found) == 1 else [policy for policy in found if not policy.own_weights]


def crowded_policies(session: Session) -> list[Policy]:
    """Policies that train all weights of a base model that others use too: no engine can serve both."""
    policies = list(session.scalars(select(Policy).order_by(Policy.id)))
    return [
        policy
        for policy in policies
        if policy.training == "full" and any(p is not policy and p.base_model == policy.base_model for p in policies)
    ]


def _wanted(session: Session, policy: Policy) -> Wanted:
    mine = select(PolicyVersion).where(
        PolicyVersion.policy_id == policy.id, PolicyVersion.files_deleted_at.is_(None)
    ).order_by(PolicyVersion.number.desc())  # fmt: skip
    been_live = session.scalars(
        mine.where(PolicyVersion.status.in_([VersionStatus.LIVE, VersionStatus.RETIRED])).limit(WINDOW)
    )
    pinned = session.scalars(mine.where(PolicyVersion.pinned, PolicyVersion.status != VersionStatus.REJECTED))
    live = session.scalar(mine.where(PolicyVersion.number == policy.live)) if policy.live is not None else None
    candidate = session.scalar(mine.where(PolicyVersion.status == VersionStatus.CANDIDATE).limit(1))
    others = {version.id: version for version in (*been_live, *pinned) if version not in (live, candidate)}
    return Wanted(
        policy_id=policy.id,
        probes=policy.probes,
        live=live,
        candidate=candidate,
        others=sorted(others.values(), key=lambda version: version.number, reverse=True),
        zero=session.scalar(mine.where(PolicyVersion.number == 0)),
        own_weights=policy.training == "full",
    )


def deployments_on(session: Session, replica_id: UUID) -> dict[UUID, Deployment]:
    """By version id."""
    rows = session.scalars(select(Deployment).where(Deployment.replica_id == replica_id))
    return {row.version_id: row for row in rows}


def known_adapters(session: Session, names: Collection[str]) -> set[str]:
    """Those of `names` that are adapters of ours; an engine may serve others."""
    return set(session.scalars(select(PolicyVersion.adapter_name).where(PolicyVersion.adapter_name.in_(names))))


def start_deployment(session: Session, replica_id: UUID, version_id: UUID) -> None:
    row = _deployment(session, replica_id, version_id)
    row.state = DeploymentState.LOADING
    # its last error stays until it is verified
    row.verdict = row.score = row.distance = row.loaded_at = row.paused_ms = row.closed_ms = None
    row.updated_at = clock(session)


def finish_deployment(
    session: Session,
    replica_id: UUID,
    version_id: UUID,
    *,
    verdict: str,
    score: float | None,
    distance: float | None,
    noise: Sequence[float] | None,
    paused_ms: float | None = None,
) -> None:
    """Loaded and checked: it can be routed to, and a replica that was closed for it is open again.

    Args:
        noise: the replica's new list of figures, if it changed.
        paused_ms: how long the engine stood still for it.
    """
    row = _deployment(session, replica_id, version_id)
    row.state, row.verdict, row.score, row.distance, row.error = (
        DeploymentState.VERIFIED, verdict, score, distance, None,
    )  # fmt: skip
    row.loaded_at = row.updated_at = clock(session)
    replica = session.get_one(Replica, replica_id)
    if noise is not None:
        replica.noise = list(noise)
    row.paused_ms = paused_ms
    if replica.swap_began_at is not None:
        row.closed_ms = 1e3 * (row.updated_at - replica.swap_began_at).total_seconds()
        replica.swap_began_at = None


def postpone_deployment(
    session: Session, replica_id: UUID, version: PolicyVersion, why: str, *, retry_s: float | None = None
) -> None:
    """It could not be loaded and checked now, which is no fault of its own. Said once for as long as `why` stays.

    retry_s: not before so long; None: at the next tick.
    """
    row = _deployment(session, replica_id, version.id)
    if row.error != why:
        add_event(session, "deployment_postponed", f"version {version.number}: {why}", policy_id=version.policy_id)
    row.error = why
    row.updated_at = clock(session)
    if retry_s is not None:
        row.state = DeploymentState.FAILED
        current = session.get_one(PolicyVersion, version.id, with_for_update=True)
        current.next_deploy_at = row.updated_at + timedelta(seconds=retry_s)


def fail_deployment(
    session: Session,
    replica_id: UUID,
    version: PolicyVersion,
    error: str,
    *,
    verdict: str | None,
    score: float | None,
    distance: float | None,
    backoff_s: Sequence[float],
) -> None:
    """Not loaded, or not what the learner made. A candidate is tried len(backoff_s) times, then rejected.

    So is the last of that many candidates in a row that failed: where updates follow each other faster than tries, each
    is replaced by the next before its own are used up, and nothing would ever stop.
    """
    row = _deployment(session, replica_id, version.id)
    if row.error != error:
        add_event(session, "deployment_failed", f"version {version.number}: {error}", policy_id=version.policy_id)
    row.state, row.verdict, row.score, row.distance, row.error = (
        DeploymentState.FAILED, verdict, score, distance, error,
    )  # fmt: skip
    row.updated_at = clock(session)
    current = session.get_one(PolicyVersion, version.id, with_for_update=True)
    # counted once when several replicas fail at the same time
    if current.status != VersionStatus.CANDIDATE or current.deploy_attempts != version.deploy_attempts:
        return
    current.deploy_attempts += 1
    in_a_row = _failing_candidates(session, current.policy_id)
    if max(current.deploy_attempts, in_a_row) < len(backoff_s):
        current.next_deploy_at = clock(session) + timedelta(seconds=backoff_s[current.deploy_attempts - 1])
        return
    current.status, current.next_deploy_at = VersionStatus.REJECTED, None
    add_event(
        session,
        "version_rejected",
        f"version {current.number} was rejected after {current.deploy_attempts} failed deployments "
        f"(failing candidates in a row: {in_a_row}): {error}",
        policy_id=current.policy_id,
        data={"version": current.number, "score": score, "distance": distance},
    )


def retry_version(session: Session, policy_id: UUID, number: int) -> PolicyVersion:
    """Make a rejected version a candidate again, with all its tries before it.

    Raises:
        NotFound: there is no such version, or its files are gone. Conflict: it is not rejected, or is older than the
            live one.
    """
    policy = lock_policy(session, policy_id)
    version = session.scalar(
        select(PolicyVersion)
        .where(PolicyVersion.policy_id == policy_id, PolicyVersion.number == number)
        .with_for_update()
    )
    if version is None or version.files_deleted_at is not None:
        raise NotFound(
            f"Version {number} {'does not exist' if version is None else 'has been deleted'}; "
            "GET /admin/policies/NAME/versions lists those that do.",
            code="version_not_found",
            param="version",
        )
    if version.status != VersionStatus.REJECTED:
        raise Conflict(
            f"Version {number} is {version.status}, not rejected: there is nothing to try again.",
            code="version_not_rejected",
            param="version",
        )
    if policy.live is not None and number < policy.live:
        raise Conflict(
            f"Version {number} is older than the live one, {policy.live}, and would take its place.",
            code="version_overtaken",
            param="version",
        )
    version.status, version.deploy_attempts, version.next_deploy_at = VersionStatus.CANDIDATE, 0, None
    # those that failed before it count no longer
    session.execute(update(PolicyVersion).where(*_candidates(policy_id)).values(deploy_attempts=0))
    add_event(session, "version_retried", f"version {number} is tried again", policy_id=policy_id)
    return version


def _candidates(policy_id: UUID) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Those of a policy that neither went live, nor were overtaken by one that did, nor were rejected."""
    return PolicyVersion.policy_id == policy_id, PolicyVersion.status == VersionStatus.CANDIDATE


def _failing_candidates(session: Session, policy_id: UUID) -> int:
    session.flush()
    failing = select(func.count()).where(*_candidates(policy_id), PolicyVersion.deploy_attempts > 0)
    return session.scalars(failing).one()


def unload_deployments(session: Session, replica_id: UUID, adapter_names: Collection[str]) -> None:
    """From now on nothing is routed to these; to be called before the engine drops them."""
    ids = select(PolicyVersion.id).where(PolicyVersion.adapter_name.in_(adapter_names))
    session.execute(
        update(Deployment)
        .where(
            Deployment.replica_id == replica_id,
            Deployment.version_id.in_(ids),
            Deployment.state != DeploymentState.FAILED,
        )
        .values(state=DeploymentState.UNLOADED, updated_at=db_now())
    )


def next_live(session: Session, policy_id: UUID) -> int | None:
    """The newest candidate that is verified on every healthy replica of the policy's base model."""
    base_model = session.get_one(Policy, policy_id).base_model
    healthy = [replica.id for replica in replicas_for(session, base_model) if replica.healthy]
    if not healthy:
        return None
    verified_on = (
        select(func.count())
        .where(
            Deployment.version_id == PolicyVersion.id,
            Deployment.state == DeploymentState.VERIFIED,
            Deployment.replica_id.in_(healthy),
        )
        .scalar_subquery()
    )
    return session.scalar(
        select(PolicyVersion.number)
        .where(
            PolicyVersion.policy_id == policy_id,
            PolicyVersion.status == VersionStatus.CANDIDATE,
            verified_on == len(healthy),
        )
        .order_by(PolicyVersion.number.desc())
        .limit(1)
    )


def go_live(session: Session, policy_id: UUID) -> int | None:
    """Serve the newest candidate that is verified everywhere; what it overtook is superseded. Returns its number."""
    policy = lock_policy(session, policy_id)
    number = next_live(session, policy_id)
    if number is None:
        return None
    versions = PolicyVersion.policy_id == policy_id
    session.execute(
        update(PolicyVersion)
        .where(versions, PolicyVersion.status == VersionStatus.LIVE)
        .values(status=VersionStatus.RETIRED)
    )
    session.execute(
        update(PolicyVersion)
        .where(versions, PolicyVersion.number < number, PolicyVersion.status == VersionStatus.CANDIDATE)
        .values(status=VersionStatus.SUPERSEDED)
    )
    session.execute(
        update(PolicyVersion)
        .where(versions, PolicyVersion.number == number)
        .values(status=VersionStatus.LIVE, live_at=db_now(), next_deploy_at=None)
    )
    policy.live = number
    return number


def policies_to_promote(session: Session) -> list[UUID]:
    """Policies with a candidate that is verified on every healthy replica of their base model."""
    candidates = select(PolicyVersion.policy_id).where(PolicyVersion.status == VersionStatus.CANDIDATE).distinct()
    return [policy_id for policy_id in session.scalars(candidates) if next_live(session, policy_id) is not None]


def _deployment(session: Session, replica_id: UUID, version_id: UUID) -> Deployment:
    row = session.scalar(
        select(Deployment).where(Deployment.replica_id == replica_id, Deployment.version_id == version_id)
    )
    if row is None:
        row = Deployment(replica_id=replica_id, version_id=version_id)
        session.add(row)
    return row
