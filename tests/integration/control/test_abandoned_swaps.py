"""Swaps of an engine's own weights whose control worker died or stood still: the next one makes them good."""

import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import update

from app.db.models import Replica
from app.db.session import Database
from app.engine.replicas import Router
from app.policies import deploy
from app.policies.deploy import Deployer
from app.rollouts.states import DeploymentState
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine
from tests.integration.control.swapping import PATIENCE_S, let_time_pass, swap_calls


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    return World(database, tmp_path / "versions", training="full")


def free_the_replica(world: World) -> None:
    """A dead process owns it for 20 s more."""
    with world.database.write() as session:
        session.execute(update(Replica).values(owned_until=datetime(2020, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize("moment", ["at_reload", "after_resume"])
def test_a_killed_control_worker_is_made_good(
    world: World, engine: FakeEngine, live: Deployer, deployer: Make, moment: str
) -> None:
    """kill -9 while the engine is paused over a reload, and while the canary reads."""
    world.add_version(1)
    reached, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        reached.set()
        go_on.wait(30)

    if moment == "at_reload":
        engine.at_reload = stop_here
    else:
        engine.at_reload = engine.busy.set
    url = world.database.url.render_as_string(hide_password=False)
    process = subprocess.Popen([sys.executable, "-m", "tests.integration.control.deploying", url, engine.url])
    if moment == "after_resume":
        while engine.calls[-1:] != ["resume"]:
            assert process.poll() is None
            threading.Event().wait(0.02)
    else:
        assert reached.wait(60)
    process.kill()
    process.wait()
    engine.at_reload = lambda: None
    go_on.set()
    engine.busy.clear()
    assert world.replica(engine.url).swap_began_at is not None
    assert world.deployment(0).state == DeploymentState.UNLOADED

    engine.calls.clear()
    live.tick(PATIENCE_S)
    assert engine.calls == [], "its owner may still be at work"
    free_the_replica(world)
    live.tick(PATIENCE_S)
    assert engine.calls == swap_calls("default-v0", "default-v1"), "first what was served, then the candidate"
    assert (world.live, engine.paused, engine.label) == (1, False, "default-v1")
    assert world.deployment(1).verdict == "verified"
    assert world.replica(engine.url).swap_began_at is None


def test_a_control_worker_that_stood_still_for_too_long_labels_nothing(
    world: World, engine: FakeEngine, live: Deployer
) -> None:
    """Its label would be believed, on weights that another process has loaded meanwhile."""
    world.add_version(1)

    def take_over() -> None:
        with world.database.write() as session:
            session.execute(update(Replica).values(owner="another", owned_until=datetime(2100, 1, 1, tzinfo=UTC)))

    engine.at_reload = take_over
    live.tick(PATIENCE_S)
    assert engine.calls == ["pause", "reload default-v1"]
    assert (world.live, world.deployment(1).state) == (0, DeploymentState.LOADING)
    assert world.replica(engine.url).swap_began_at is not None


def test_an_engine_that_somebody_paused_is_resumed(world: World, engine: FakeEngine, live: Deployer) -> None:
    engine.paused = True
    live.tick(PATIENCE_S)
    assert engine.calls == swap_calls("default-v0")
    assert not engine.paused
    assert pick(Router(world.database), world.policy_id).version == 0


def test_a_busy_engine_is_not_stopped_again_for_the_live_version(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch, deployer: Make
) -> None:
    monkeypatch.setattr(deploy, "WORK_TIMEOUT_S", 0.3)
    live.close()
    engine.paused = True  # by a process that is dead
    engine.busy.set()
    impatient = deployer(engine.url)
    for _ in range(2):
        impatient.tick(PATIENCE_S)
        let_time_pass(world)
    assert engine.calls == swap_calls("default-v0")
    assert world.deployment(0).verdict == "unchecked"
    assert pick(Router(world.database), world.policy_id).version == 0
