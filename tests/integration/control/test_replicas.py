"""Several replicas, several processes that deploy, and adapters that are not ours."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, update

from app.db.models import Deployment, PolicyVersion, Replica
from app.db.session import Database
from app.engine.replicas import Router
from app.errors import Unavailable
from app.policies import ownership
from app.policies.deploy import Deployer
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine
from tests.integration.control.processes import eventually

DEAD = "http://127.0.0.1:9"
"""The discard port: nothing listens."""


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
    monkeypatch.setattr(ownership, "OWNED_S", 0.8)
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
