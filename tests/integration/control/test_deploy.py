"""Deployment ticks against engines over HTTP, on both databases."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import select, update

from app.db.models import Deployment, Event, PolicyVersion, Replica
from app.db.repositories.deployments import retry_version
from app.db.session import Database
from app.engine.replicas import Route, Router
from app.errors import ApiError, Conflict, NotFound, Unavailable
from app.policies import reconcile
from app.policies.canary import NOISE_SAMPLES
from app.policies.deploy import Deployer
from app.rollouts.learning import Idle, claim_update
from app.rollouts.states import DeploymentState, VersionStatus
from tests.integration.control.conftest import World
from tests.integration.control.fake_engine import FakeEngine
from tests.integration.control.processes import eventually

DEAD = "http://127.0.0.1:9"
"""The discard port: nothing listens."""

Make = Callable[..., Deployer]


@pytest.fixture
def deployer(database: Database) -> Iterator[Make]:
    made: list[Deployer] = []

    def make(*urls: str) -> Deployer:
        made.append(Deployer(database, urls))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pick(router: Router, policy_id: UUID, number: int | None = None) -> Route:
    return asyncio.run(router.pick(policy_id, number))


def measure_noise(database: Database) -> None:
    with database.write() as session:
        session.execute(update(Replica).values(noise=[0.01] * NOISE_SAMPLES))


def events(database: Database) -> list[str]:
    with database.read() as session:
        return list(session.scalars(select(Event.kind).order_by(Event.at)))


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
    measure_noise(world.database)
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
    assert events(world.database) == ["deployment_failed", "version_rejected"]
    tick()
    assert engine.loads.count("default-v1") == 3


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
    assert events(world.database) == ["deployment_failed", "version_rejected", "version_retried"]


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
    measure_noise(world.database)
    world.add_version(1)
    engine.serves_instead["default-v1"] = str(world.path(0))
    tick()
    failed = world.deployment(1)
    assert (failed.state, failed.verdict) == (DeploymentState.FAILED, "failed")
    assert failed.score == pytest.approx(0.0, abs=1e-6)
    assert world.live == 0
    assert "default-v1" not in engine.adapters, "a failed one is not left loaded"
    assert events(world.database) == ["deployment_failed"]


def test_before_the_noise_is_measured_the_canary_alarms_only(world: World, engine: FakeEngine, deployer: Make) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.serves_instead["default-v1"] = str(world.path(0))
    tick()
    assert (world.live, world.deployment(1).verdict) == (1, "failed")
    assert events(world.database) == ["canary_alarm"]
    with world.database.read() as session:
        assert session.scalars(select(Replica.noise)).one() == []


def test_a_dead_replica_stalls_neither_the_tick_nor_the_others(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    second_engine.silent.set()  # it accepts and never answers
    one = deployer(DEAD, engine.url, second_engine.url)
    before = time.monotonic()
    one.tick()
    assert time.monotonic() - before < 3.5
    assert world.live == 0
    with world.database.read() as session:
        healthy = {row.url: row.healthy for row in session.scalars(select(Replica))}
    assert healthy == {DEAD: False, engine.url: True, second_engine.url: False}
    second_engine.silent.clear()


def test_a_version_goes_live_once_every_healthy_replica_has_it(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url, second_engine.url).tick
    tick()
    second_engine.rejects.add("default-v1")
    world.add_version(1)
    tick()
    assert set(engine.adapters) == {"default-v0", "default-v1"}
    assert world.live == 0
    second_engine.rejects.clear()
    with world.database.write() as session:
        session.execute(update(PolicyVersion).values(next_deploy_at=None))
    tick()
    assert world.live == 1


def test_a_replica_that_died_is_not_routed_to(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url, second_engine.url).tick
    tick()
    router = Router(world.database)
    first, second = pick(router, world.policy_id), pick(router, world.policy_id)
    assert {first.url, second.url} == {engine.url, second_engine.url}, "the one with fewer requests in flight"
    second.release()
    second.release()
    with pick(router, world.policy_id) as third:
        assert third.url == second.url
    engine.stop()
    tick()
    for _ in range(3):
        assert (pick(router, world.policy_id)).url == second_engine.url
    second_engine.stop()
    tick()
    with pytest.raises(Unavailable) as nobody:
        pick(router, world.policy_id)
    assert nobody.value.code == "no_replica"


def test_two_ticks_at_once_load_nothing_twice(world: World, engine: FakeEngine, database: Database) -> None:
    deployers = [Deployer(database, [engine.url]) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for number in range(4):
            if number:
                world.add_version(number)
            for future in [pool.submit(one.tick) for one in deployers]:
                future.result()
    eventually(lambda: (deployers[0].tick(), world.live == 3)[1], within_s=10, what="version 3 live")
    assert sorted(engine.loads) == [f"default-v{n}" for n in range(4)]
    for one in deployers:
        one.close()


def test_what_another_process_has_loaded_meanwhile_is_loaded(world: World, engine: FakeEngine, deployer: Make) -> None:
    tick = deployer(engine.url).tick
    tick()
    world.add_version(1)
    engine.loads_first.add("default-v1")
    tick()
    assert (world.live, world.version(1).deploy_attempts) == (1, 0)


def test_a_call_longer_than_an_ownership_keeps_others_away(
    world: World, engine: FakeEngine, deployer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = deployer(engine.url), deployer(engine.url)
    first.tick()
    world.add_version(1)
    monkeypatch.setattr(reconcile, "OWNED_S", 0.8)
    engine.load_s = 3.0
    first.tick(wait_s=1.5)
    second.tick(wait_s=0.5)
    eventually(lambda: (first.tick(), world.live == 1)[1], within_s=10, what="version 1 live")
    assert engine.loads == ["default-v0", "default-v1"]


def test_a_load_that_a_killed_process_left_unchecked_is_checked(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    tick()
    version_id = world.add_version(1)
    engine.adapters["default-v1"] = str(world.path(1))
    with world.database.write() as session:
        replica = session.scalars(select(Replica)).one()
        session.add(Deployment(replica_id=replica.id, version_id=version_id))
    tick()
    assert (world.live, world.deployment(1).verdict) == (1, "verified")
    assert engine.loads == ["default-v0"], "it was loaded already"


def test_adapters_of_others_are_left_alone(world: World, engine: FakeEngine, deployer: Make) -> None:
    engine.adapters["somebody-elses"] = "/elsewhere"
    deployer(engine.url).tick()
    assert set(engine.adapters) == {"somebody-elses", "default-v0"}


def test_a_replica_that_is_no_longer_configured_is_not_routed_to(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    deployer(engine.url, second_engine.url).tick()
    deployer(engine.url).tick()
    with world.database.read() as session:
        rows = {row.url: (row.removed, row.healthy) for row in session.scalars(select(Replica))}
    assert rows == {engine.url: (False, True), second_engine.url: (True, False)}
