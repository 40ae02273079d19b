"""What a replica should load next, and keep."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from app.db.models import Deployment, PolicyVersion
from app.db.repositories.deployments import Wanted
from app.policies.plan import RETRY_S, make_plan
from app.rollouts.states import DeploymentState, VersionStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROBES = [[1, 2, 3]]


def version(number: int, status: VersionStatus = VersionStatus.RETIRED) -> PolicyVersion:
    return PolicyVersion(
        id=uuid4(), policy_id=uuid4(), number=number, adapter_name=f"v{number}", path=f"/v{number}", status=status,
        deploy_attempts=0,
    )  # fmt: skip


def deployed(row: PolicyVersion, state: DeploymentState = DeploymentState.VERIFIED) -> tuple[UUID, Deployment]:
    return row.id, Deployment(version_id=row.id, state=state, updated_at=NOW)


ZERO, OLD, LIVE = version(0), version(4), version(5, VersionStatus.LIVE)
NEW = version(6, VersionStatus.CANDIDATE)


def wanted(
    live: PolicyVersion | None = LIVE,
    candidate: PolicyVersion | None = NEW,
    others: list[PolicyVersion] | None = None,
) -> Wanted:
    return Wanted(uuid4(), PROBES, live, candidate, [OLD] if others is None else others, ZERO)


def test_the_first_version_is_loaded_without_a_reference() -> None:
    zero = version(0, VersionStatus.CANDIDATE)
    plan = make_plan([Wanted(uuid4(), None, None, zero, [], zero)], {}, NOW)
    assert plan.step is not None
    assert (plan.step.version, plan.step.reference) == (zero, None)


def test_a_candidate_is_checked_against_the_live_version() -> None:
    plan = make_plan([wanted()], dict([deployed(LIVE), deployed(OLD)]), NOW)
    assert plan.step is not None
    assert (plan.step.version, plan.step.reference, plan.step.probes) == (NEW, LIVE, PROBES)
    assert plan.keep == {"v4", "v5", "v6"}


def test_a_restarted_replica_gets_the_live_version_first_checked_against_version_zero() -> None:
    first = make_plan([wanted()], {}, NOW)
    assert first.step is not None
    assert (first.step.version, first.step.reference) == (ZERO, None)
    assert first.keep == {"v0", "v4", "v5", "v6"}
    second = make_plan([wanted()], dict([deployed(ZERO)]), NOW)
    assert second.step is not None
    assert (second.step.version, second.step.reference) == (LIVE, ZERO)
    third = make_plan([wanted()], dict([deployed(ZERO), deployed(LIVE)]), NOW)
    assert third.step is not None
    assert (third.step.version, third.step.reference) == (NEW, LIVE)
    assert third.keep == {"v4", "v5", "v6"}, "version 0 has done its work"


def test_live_versions_of_all_policies_come_before_any_candidate() -> None:
    other_zero, other_live = version(0), version(3, VersionStatus.LIVE)
    other = Wanted(uuid4(), PROBES, other_live, None, [], other_zero)
    plan = make_plan([wanted(), other], dict([deployed(LIVE), deployed(other_zero)]), NOW)
    assert plan.step is not None
    assert plan.step.version is other_live


def test_a_failed_candidate_waits_for_its_backoff() -> None:
    failed = dict([deployed(LIVE), deployed(OLD), deployed(NEW, DeploymentState.FAILED)])
    NEW.next_deploy_at = NOW + timedelta(seconds=1)
    assert make_plan([wanted()], failed, NOW).step is None
    due = make_plan([wanted()], failed, NOW + timedelta(seconds=1)).step
    NEW.next_deploy_at = None
    assert due is not None
    assert due.version is NEW


def test_a_failed_live_version_is_tried_again_after_a_while() -> None:
    failed = dict([deployed(ZERO), deployed(LIVE, DeploymentState.FAILED)])
    now = make_plan([wanted(candidate=None, others=[])], failed, NOW)
    assert now.step is None
    later = make_plan([wanted(candidate=None, others=[])], failed, NOW + timedelta(seconds=RETRY_S))
    assert later.step is not None
    assert later.step.version is LIVE


def test_a_deployment_that_a_killed_process_left_loading_is_taken_up() -> None:
    plan = make_plan([wanted()], dict([deployed(LIVE), deployed(NEW, DeploymentState.LOADING)]), NOW)
    assert plan.step is not None
    assert plan.step.version is NEW


def test_nothing_is_left_to_do() -> None:
    plan = make_plan([wanted()], dict([deployed(LIVE), deployed(NEW), deployed(OLD)]), NOW)
    assert plan.step is None
