"""What one replica should have loaded, and the next step towards it. Pure: rows in, a plan out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.db.models import Deployment, PolicyVersion
from app.db.repositories.deployments import Wanted
from app.rollouts.states import DeploymentState, VersionStatus

RETRY_S = 10.0
"""A failed deployment of a version that has been live is tried again after this long; a candidate has its backoff."""


@dataclass(frozen=True)
class Step:
    """Load this version and check it against the reference (None: nothing to check it with)."""

    version: PolicyVersion
    reference: PolicyVersion | None
    probes: Sequence[Sequence[int]]
    own_weights: bool = False
    """It takes the place of the engine's own weights, for which new requests wait; else it is one more adapter."""


@dataclass(frozen=True)
class Plan:
    keep: set[str]
    """Adapter names that stay loaded."""
    step: Step | None


def make_plan(wanted: Sequence[Wanted], deployments: Mapping[UUID, Deployment], now: datetime) -> Plan:
    """Live versions come first, then candidates, then the rest of the windows.

    Args:
        deployments: the replica's, by version id.
    """
    keep: set[str] = set()
    steps: list[tuple[int, Step]] = []
    for policy in wanted:
        keep |= {version.adapter_name for version in _kept(policy, deployments)}
        steps_of = _swaps if policy.own_weights else _steps
        tiered = next(steps_of(policy, deployments, now), None)
        if tiered is not None:
            steps.append(tiered)
    _, step = min(steps, key=lambda tiered: tiered[0], default=(0, None))
    return Plan(keep, step)


def _verified(version: PolicyVersion | None, deployments: Mapping[UUID, Deployment]) -> bool:
    row = deployments.get(version.id) if version is not None else None
    return row is not None and row.state == DeploymentState.VERIFIED


def _kept(policy: Wanted, deployments: Mapping[UUID, Deployment]) -> Iterator[PolicyVersion]:
    if policy.live is not None:
        yield policy.live
    if policy.candidate is not None:
        yield policy.candidate
    yield from policy.others
    if policy.zero is not None and not _verified(policy.live, deployments):
        yield policy.zero


def _steps(policy: Wanted, deployments: Mapping[UUID, Deployment], now: datetime) -> Iterator[tuple[int, Step]]:
    """What can be done now, with its tier (0 is the most urgent), best first."""
    ready = policy.live if _verified(policy.live, deployments) else policy.zero
    for tier, version in enumerate((policy.live, policy.candidate, *policy.others)):
        if version is None or _verified(version, deployments) or not _due(version, deployments, now):
            continue
        if version.number == 0 or ready is None:
            yield min(tier, 2), Step(version, None, ())
        elif _verified(ready, deployments):
            yield min(tier, 2), Step(version, ready, policy.probes or ())
        elif _due(ready, deployments, now):
            yield min(tier, 2), Step(ready, None, ())


def _swaps(policy: Wanted, deployments: Mapping[UUID, Deployment], now: datetime) -> Iterator[tuple[int, Step]]:
    """The same for an engine with one version at a time: the newest candidate while it is due, else the live one.

    A candidate is only tried where something else is served, so that what it replaces can be put back. The reference
    need not be loaded: what the engine said under it is remembered. A live version that comes back is compared with
    one before it.
    """
    live, candidate = policy.live, policy.candidate
    if _verified(candidate, deployments):
        return
    serves = any(row.state == DeploymentState.VERIFIED for row in deployments.values())
    if candidate is not None and (live is None or serves) and _due(candidate, deployments, now):
        yield 1, Step(candidate, live, policy.probes or (), own_weights=True)
    elif live is not None and not _verified(live, deployments) and _due(live, deployments, now):
        reference = next((version for version in policy.others if version.number < live.number), policy.zero)
        yield 0, Step(live, None if reference is live else reference, policy.probes or (), own_weights=True)


def _due(version: PolicyVersion, deployments: Mapping[UUID, Deployment], now: datetime) -> bool:
    row = deployments.get(version.id)
    if row is None or row.state != DeploymentState.FAILED:
        return True
    if version.status == VersionStatus.CANDIDATE:
        return version.next_deploy_at is None or version.next_deploy_at <= now
    return row.updated_at + timedelta(seconds=RETRY_S) <= now
