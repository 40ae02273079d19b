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


def whole(live: PolicyVersion | None = LIVE, candidate: PolicyVersion | None = NEW) -> Wanted:
    """Of a policy that trains all weights."""
    return Wanted(uuid4(), PROBES, live, candidate, [OLD], ZERO, own_weights=True)


def test_whole_weights_replace_the_live_version_and_nothing_else_is_loaded() -> None:
    plan = make_plan([whole()], dict([deployed(LIVE)]), NOW)
    assert plan.step is not None
    assert (plan.step.version, plan.step.reference, plan.step.own_weights) == (NEW, LIVE, True)
    assert make_plan([whole(candidate=None)], dict([deployed(LIVE)]), NOW).step is None


def test_whole_weights_of_a_candidate_that_other_replicas_lack_stay() -> None:
    assert make_plan([whole()], dict([deployed(NEW)]), NOW).step is None


def test_whole_weights_go_from_one_candidate_to_the_next_without_the_live_version_between() -> None:
    older = version(6, VersionStatus.SUPERSEDED)
    plan = make_plan([whole(candidate=version(7, VersionStatus.CANDIDATE))], dict([deployed(older)]), NOW)
    assert plan.step is not None
    assert plan.step.version.number == 7


def test_an_engine_without_known_weights_gets_the_live_version_before_any_candidate() -> None:
    plan = make_plan([whole()], {}, NOW)
    assert plan.step is not None
    assert (plan.step.version, plan.step.reference) == (LIVE, OLD)
    failed = dict([deployed(LIVE, DeploymentState.FAILED)])
    assert make_plan([whole()], failed, NOW).step is None, "with nothing to put back no candidate is tried"
    again = make_plan([whole()], failed, NOW + timedelta(seconds=RETRY_S)).step
    assert again is not None
    assert again.version is LIVE


def test_the_first_whole_weights_have_no_reference() -> None:
    zero = version(0, VersionStatus.CANDIDATE)
    plan = make_plan([Wanted(uuid4(), None, None, zero, [], zero, own_weights=True)], {}, NOW)
    assert plan.step is not None
    assert (plan.step.version, plan.step.reference, plan.step.own_weights) == (zero, None, True)


def test_a_failed_candidate_of_whole_weights_waits_for_its_backoff() -> None:
    late = version(6, VersionStatus.CANDIDATE)
    late.next_deploy_at = NOW + timedelta(seconds=5)
    rows = dict([deployed(LIVE), deployed(late, DeploymentState.FAILED)])
    assert make_plan([whole(candidate=late)], rows, NOW).step is None
    assert make_plan([whole(candidate=late)], rows, NOW + timedelta(seconds=5)).step is not None


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
