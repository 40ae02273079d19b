"""Policies on several base models: an adapter is loaded only where the engine serves its own."""

from pathlib import Path

import pytest

from app.db.session import Database
from app.engine.replicas import Router
from app.errors import Unavailable
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine


def test_a_policy_on_a_base_that_no_engine_serves_is_loaded_nowhere(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    engine.base = "/of-the-same-shapes"
    tick = deployer(engine.url).tick
    tick()
    tick()
    assert (world.live, engine.loads) == (None, [])
    assert world.events() == ["base_model_not_served"], "once, not at every tick"
    with pytest.raises(Unavailable) as unserved:
        pick(Router(world.database), world.policy_id)
    assert unserved.value.code == "base_model_not_served"


def test_each_engine_serves_the_policies_of_its_base(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make, database: Database, tmp_path: Path
) -> None:
    other = World(database, tmp_path, name="other", base_model="/other")
    second_engine.base = "/other"
    tick = deployer(engine.url, second_engine.url).tick
    tick()
    world.add_version(1)
    tick()
    assert (set(engine.adapters), set(second_engine.adapters)) == ({"default-v0", "default-v1"}, {"other-v0"})
    assert (world.live, other.live) == (1, 0)
    router = Router(database)
    assert pick(router, world.policy_id).url == engine.url
    assert pick(router, other.policy_id).url == second_engine.url


def test_an_engine_that_came_back_on_another_base_is_cleared_of_what_it_has(
    world: World, engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url).tick
    tick()
    assert world.live == 0
    engine.base = "/other"
    tick()
    assert engine.adapters == {}
    with pytest.raises(Unavailable) as unserved:
        pick(Router(world.database), world.policy_id)
    assert unserved.value.code == "base_model_not_served"
