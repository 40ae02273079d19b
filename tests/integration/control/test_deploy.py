"""Deployment ticks against engines over HTTP, on both databases."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import select, update

from app.db.models import PolicyVersion, Replica
from app.db.repositories.deployments import retry_version
from app.engine.replicas import Router
from app.errors import ApiError, Conflict, NotFound, Unavailable
from app.policies import deploy
from app.rollouts.learning import Idle, claim_update
from app.rollouts.states import DeploymentState, VersionStatus
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine


def test_versions_go_live_one_after_the_other(world: World, engine: FakeEngine, deployer: Make) -> None:
    router = Router(world.database)
    with pytest.raises(Unavailable) as preparing:
        pick(router, world.policy_id)
    assert preparing.value.code == "policy_preparing"

    tick = deployer(engine.url).tick
    tick()
    assert (world.live, world.status(0)) == (0, VersionStatus.LIVE)
    assert world.deployment(0).verdict == "unchecked"

    world.add_version(1)
    tick()
    assert (world.live, world.status(0), world.status(1)) == (1, VersionStatus.RETIRED, VersionStatus.LIVE)
    one = world.deployment(1)
    assert one.verdict == "verified"
    assert one.score == pytest.approx(1.0, abs=0.05)
    assert one.distance is not None
    assert one.distance > 1.0
    assert world.version(1).live_at is not None

    live, pinned = pick(router, world.policy_id), pick(router, world.policy_id, 0)
    assert (live.url, live.adapter_name, live.version) == (engine.url, "default-v1", 1)
    assert (pinned.adapter_name, pinned.version) == ("default-v0", 0)
    with pytest.raises(NotFound) as missing:
        pick(router, world.policy_id, 7)
    assert missing.value.code == "version_not_loaded"


def test_only_the_newest_candidate_is_deployed(world: World, engine: FakeEngine, deployer: Make) -> None:
    tick = deployer(engine.url).tick
    tick()
    for number in (1, 2, 3):
        world.add_version(number)
    tick()
    assert world.live == 3
    assert [world.status(n) for n in (1, 2)] == [VersionStatus.SUPERSEDED] * 2
    assert engine.loads == ["default-v0", "default-v3"]


def test_the_last_eight_that_were_live_stay_loaded_and_the_pinned_one(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    for number in range(11):
        if number:
            world.add_version(number)
        tick()
    with world.database.write() as session:
        session.execute(update(PolicyVersion).where(PolicyVersion.number == 1).values(pinned=True))
    tick()
    assert set(engine.adapters) == {f"default-v{n}" for n in (1, *range(3, 11))}
    assert world.deployment(2).state == DeploymentState.UNLOADED
    with pytest.raises(NotFound):
        pick(Router(world.database), world.policy_id, 2)


def test_a_restarted_replica_is_brought_back_the_live_version_first(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    for number in range(4):
        if number:
            world.add_version(number)
        tick()
    world.measure_noise()
    engine.restart()
    tick()
    assert engine.loads == ["default-v0", "default-v3", "default-v2", "default-v1"]
    assert set(engine.adapters) == {f"default-v{n}" for n in range(4)}
    assert [world.deployment(n).verdict for n in (1, 2, 3)] == ["verified"] * 3
    assert world.live == 3


def test_a_rejected_load_is_tried_three_times_and_the_old_version_stays(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.rejects.add("default-v1")
    for attempt in (1, 2):
        tick()
        tick()  # the backoff has not passed
        row = world.version(1)
        assert (row.deploy_attempts, row.status) == (attempt, VersionStatus.CANDIDATE)
        assert row.next_deploy_at is not None
        with world.database.write() as session:
            session.execute(update(PolicyVersion).values(next_deploy_at=datetime(2020, 1, 1, tzinfo=UTC)))
    tick()
    assert (world.status(1), world.live) == (VersionStatus.REJECTED, 0)
    assert engine.loads.count("default-v1") == 3
    assert "rank 64" in str(world.deployment(1).error)
    assert world.events() == ["deployment_failed", "version_rejected"]
    tick()
    assert engine.loads.count("default-v1") == 3


def test_a_busy_engine_puts_a_version_off_and_does_not_fail_it(
    world: World, engine: FakeEngine, deployer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its canary's probes wait in the queue for longer than anybody waits for them."""
    monkeypatch.setattr(deploy, "WORK_TIMEOUT_S", 0.2)
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.busy.set()
    for _ in range(4):
        tick()
    assert (world.status(1), world.version(1).deploy_attempts, world.live) == (VersionStatus.CANDIDATE, 0, 0)
    assert "too busy" in str(world.deployment(1).error)
    assert world.events() == ["deployment_postponed"], "once, not at every tick"
    engine.busy.clear()
    tick()
    assert (world.live, world.deployment(1).error) == (1, None)


def test_a_rejected_version_is_tried_again_when_told_and_learning_goes_on(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.rejects.add("default-v1")
    for _ in range(3):
        tick()
        with world.database.write() as session:
            session.execute(update(PolicyVersion).values(next_deploy_at=None))
    with world.database.write() as session:
        idle = claim_update(session, world.policy_id, owner="learner")
    assert isinstance(idle, Idle)
    assert idle.reason.startswith("deploy_failing: version 1 ")
    assert idle.reason.endswith("POST /admin/policies/default/versions/1/retry")

    with world.database.write() as session:
        retry_version(session, world.policy_id, 1)
    tick()
    assert world.version(1).deploy_attempts == 1, "it has all three tries again"
    with world.database.write() as session:
        session.execute(update(PolicyVersion).values(next_deploy_at=None))
        assert claim_update(session, world.policy_id, owner="learner").reason.startswith("too_few_rollouts: 0 ready")
    engine.rejects.clear()
    tick()
    assert (world.live, world.status(1)) == (1, VersionStatus.LIVE)
    assert world.events() == ["deployment_failed", "version_rejected", "version_retried"]


def test_what_is_not_rejected_or_is_overtaken_is_not_tried_again(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    tick()
    for number, code in ((0, "version_not_rejected"), (7, "version_not_found")):
        with world.database.write() as session, pytest.raises(ApiError) as refused:
            retry_version(session, world.policy_id, number)
        assert refused.value.code == code
    world.add_version(1)
    with world.database.write() as session:
        session.execute(update(PolicyVersion).where(PolicyVersion.number == 1).values(status=VersionStatus.REJECTED))
    world.add_version(2)
    tick()
    assert world.live == 2
    with world.database.write() as session, pytest.raises(Conflict) as overtaken:
        retry_version(session, world.policy_id, 1)
    assert overtaken.value.code == "version_overtaken"


def test_three_failing_candidates_in_a_row_are_enough(world: World, engine: FakeEngine, deployer: Make) -> None:
    """Each replaced by the next before its second try; one that goes live in between starts the count anew."""
    tick = deployer(engine.url).tick
    tick()
    engine.rejects |= {f"default-v{number}" for number in (1, 2, 4, 5, 6)}
    for number in range(1, 6):
        world.add_version(number)
        tick()
    assert world.live == 3
    assert world.status(5) == VersionStatus.CANDIDATE
    world.add_version(6)
    tick()
    assert [world.status(number) for number in (4, 5, 6)] == ["candidate", "candidate", "rejected"]
    assert engine.loads.count("default-v6") == 1
    with world.database.write() as session:
        retry_version(session, world.policy_id, 6)
    tick()
    assert (world.status(6), world.version(6).deploy_attempts) == (VersionStatus.CANDIDATE, 1)


def test_a_swap_that_silently_did_not_happen_is_caught(world: World, engine: FakeEngine, deployer: Make) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.measure_noise()
    world.add_version(1)
    engine.serves_instead["default-v1"] = str(world.path(0))
    tick()
    failed = world.deployment(1)
    assert (failed.state, failed.verdict) == (DeploymentState.FAILED, "failed")
    assert failed.score == pytest.approx(0.0, abs=1e-6)
    assert world.live == 0
    assert "default-v1" not in engine.adapters, "a failed one is not left loaded"
    assert world.events() == ["deployment_failed"]


def test_before_the_noise_is_measured_the_canary_alarms_only(world: World, engine: FakeEngine, deployer: Make) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.serves_instead["default-v1"] = str(world.path(0))
    tick()
    assert (world.live, world.deployment(1).verdict) == (1, "failed")
    assert world.events() == ["canary_alarm"]
    with world.database.read() as session:
        assert session.scalars(select(Replica.noise)).one() == []
