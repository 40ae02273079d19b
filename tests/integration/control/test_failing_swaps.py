"""Swaps of an engine's own weights that go wrong: what was served comes back, and the engine goes on."""

import threading
from pathlib import Path
from time import monotonic

import pytest

from app.db.repositories import swaps
from app.db.repositories.stats import standstills
from app.db.session import Database
from app.engine.replicas import Router
from app.policies import deploy
from app.policies.deploy import Deployer
from app.rollouts.states import DeploymentState, VersionStatus
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine
from tests.integration.control.swapping import PATIENCE_S, let_time_pass, swap_calls


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    return World(database, tmp_path / "versions", training="full")


def test_a_refused_reload_puts_the_old_weights_back(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.add_version(1)
    engine.rejects.add("default-v1")
    for attempt in (1, 2, 3):
        engine.calls.clear()
        live.tick(PATIENCE_S)
        live.tick(PATIENCE_S)  # the backoff has not passed
        assert engine.calls == ["pause", "reload default-v1", *swap_calls("default-v0")]
        assert world.version(1).deploy_attempts == attempt
        assert (world.live, engine.label, engine.paused) == (0, "default-v0", False)
        zero = world.deployment(0)
        assert (zero.state, zero.verdict) == (DeploymentState.VERIFIED, "unchecked")
        assert world.replica(engine.url).swap_began_at is None
        assert pick(Router(world.database), world.policy_id).version == 0
        let_time_pass(world)
    assert world.status(1) == VersionStatus.REJECTED
    assert "another model" in str(world.deployment(1).error)
    assert world.events() == ["deployment_failed", "version_rejected"]


def test_a_swap_that_silently_did_not_happen_is_undone(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.measure_noise()
    world.add_version(1)
    engine.serves_instead["default-v1"] = str(world.path(0))
    live.tick(PATIENCE_S)
    failed = world.deployment(1)
    assert (failed.state, failed.verdict) == (DeploymentState.FAILED, "failed")
    assert failed.score == pytest.approx(0.0, abs=1e-6)
    assert (world.live, engine.weights, engine.label) == (0, str(world.path(0)), "default-v0")
    assert engine.calls == swap_calls("default-v1", "default-v0")
    engine.serves_instead.clear()
    let_time_pass(world)
    live.tick(PATIENCE_S)
    assert (world.live, world.deployment(1).verdict) == (1, "verified")


def test_a_busy_engine_puts_a_version_off(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch, deployer: Make
) -> None:
    """Whatever asks for a token waits behind what runs: the old weights come back without one, and the next try is not
    at the next tick."""
    world.add_version(1)
    monkeypatch.setattr(deploy, "WORK_TIMEOUT_S", 0.5)
    live.close()
    impatient = deployer(engine.url)
    engine.at_reload = engine.busy.set
    for _ in range(3):
        impatient.tick(PATIENCE_S)
    assert not engine.paused
    assert (world.live, world.status(1), world.version(1).deploy_attempts) == (0, VersionStatus.CANDIDATE, 0)
    assert engine.calls == swap_calls("default-v1", "default-v0")
    assert "too busy" in str(world.deployment(1).error)
    assert world.events() == ["deployment_postponed"]
    assert pick(Router(world.database), world.policy_id).version == 0
    engine.at_reload = lambda: None
    engine.busy.clear()
    let_time_pass(world)
    impatient.tick(PATIENCE_S)
    assert (world.live, world.deployment(1).error) == (1, None)


def test_weights_that_cannot_be_put_back_are_tried_again(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.add_version(1)
    engine.rejects |= {"default-v0", "default-v1"}
    live.tick(PATIENCE_S)
    assert engine.paused, "nobody knows what weights it has"
    assert "weights_not_put_back" in world.events()
    closed_at, still_since = world.replica(engine.url).swap_began_at, monotonic()
    let_time_pass(world)
    live.tick(PATIENCE_S)
    assert world.replica(engine.url).swap_began_at == closed_at, "another try is no other swap"
    still_ms = 1e3 * (monotonic() - still_since)
    engine.rejects.clear()
    engine.calls.clear()
    let_time_pass(world)
    live.tick(PATIENCE_S)
    assert engine.calls == swap_calls("default-v0", "default-v1")
    assert (engine.paused, world.live) == (False, 1)
    zero = world.deployment(0)
    assert zero.paused_ms is not None
    assert zero.closed_ms is not None
    assert still_ms < zero.paused_ms <= zero.closed_ms


def test_an_engine_that_is_lost_in_the_middle(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.add_version(1)
    engine.at_reload = lambda: (_ for _ in ()).throw(ConnectionResetError())  # type: ignore[assignment]
    engine.lacks.add("/health")
    live.tick(PATIENCE_S)
    assert (world.version(1).deploy_attempts, world.live) == (0, 0), "that says nothing about the version"
    engine.lacks.clear()
    engine.at_reload = lambda: None
    engine.restart()
    live.tick(PATIENCE_S)
    assert (world.live, engine.label) == (1, "default-v1")


def reloads(engine: FakeEngine) -> list[str]:
    return [call.removeprefix("reload ") for call in engine.calls if call.startswith("reload")]


def test_a_reload_is_waited_for(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch, deployer: Make
) -> None:
    """However long any other call may take."""
    world.add_version(1)
    monkeypatch.setattr(deploy, "WORK_TIMEOUT_S", 1.0)
    live.close()
    engine.at_reload = lambda: time_passes(1.5)
    deployer(engine.url).tick(PATIENCE_S)
    assert engine.calls == swap_calls("default-v1")
    assert (world.live, engine.paused) == (1, False)


def time_passes(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_reload_that_does_not_answer(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch, deployer: Make
) -> None:
    """No other is asked for before it has ended, and then the engine goes on."""
    world.add_version(1)
    monkeypatch.setattr(deploy, "WORK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(deploy, "RELOAD_TIMEOUT_S", 0.3)
    live.close()
    impatient = deployer(engine.url)
    ended = threading.Event()
    engine.at_reload = lambda: ended.wait(PATIENCE_S) and None
    for _ in range(3):
        impatient.tick(PATIENCE_S)
        let_time_pass(world)
    assert reloads(engine) == ["default-v1"]
    assert engine.paused
    assert world.version(1).deploy_attempts == 1
    assert "has not ended its reload" in str(world.deployment(1).error)
    assert world.events() == ["deployment_failed", "weights_not_put_back", "deployment_postponed"]
    engine.at_reload = lambda: None
    ended.set()
    impatient.tick(PATIENCE_S)
    let_time_pass(world)
    impatient.tick(PATIENCE_S)
    assert reloads(engine) == ["default-v1", "default-v0", "default-v1"]
    assert (world.live, engine.paused, engine.calls[-1]) == (1, False, "resume")


def test_a_label_that_fails(world: World, engine: FakeEngine, live: Deployer) -> None:
    """The old weights still have theirs."""
    world.add_version(1)
    engine.fails.add("/update_weight_version")
    live.tick(PATIENCE_S)
    assert engine.calls == ["pause", "reload default-v1", "pause", "reload default-v0", "resume"]
    assert (world.live, world.version(1).deploy_attempts, engine.paused) == (0, 1, False)
    assert pick(Router(world.database), world.policy_id).version == 0


def test_a_resume_that_fails(world: World, engine: FakeEngine, live: Deployer) -> None:
    """It is asked for again, until the engine runs."""
    world.add_version(1)
    engine.fails.add("/resume")
    live.tick(PATIENCE_S)
    assert (world.live, world.version(1).deploy_attempts, engine.paused) == (0, 1, True)
    assert "weights_not_put_back" in world.events()
    assert world.replica(engine.url).swap_began_at is not None
    engine.fails.clear()
    let_time_pass(world)
    live.tick(PATIENCE_S)
    assert (world.live, engine.paused, engine.label) == (1, False, "default-v1")
    assert pick(Router(world.database), world.policy_id).version == 1


def test_how_long_an_engine_stood_still_for_a_version_that_failed(
    world: World, engine: FakeEngine, live: Deployer
) -> None:
    """Its undoing included; the row of the one that came back says the same."""
    world.add_version(1)
    engine.rejects.add("default-v1")
    engine.at_reload = lambda: time_passes(0.3)
    live.tick(PATIENCE_S)
    zero, one = world.deployment(0), world.deployment(1)
    assert one.paused_ms is not None
    assert one.closed_ms is not None
    assert 600 <= one.paused_ms <= one.closed_ms
    assert (zero.paused_ms, zero.closed_ms) == (one.paused_ms, one.closed_ms)
    with world.database.read() as session:
        paused, closed = standstills(session, world.policy_id)
    assert (paused, closed) == ([one.paused_ms / 1e3], [one.closed_ms / 1e3]), "one swap, at two versions"


def test_a_swap_that_is_overdue_is_reported_once(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is waited for."""
    monkeypatch.setattr(swaps, "SWAP_OVERDUE_S", 0.0)
    world.add_version(1)
    paused, ended = threading.Event(), threading.Event()

    def reload() -> None:
        paused.set()
        ended.wait(PATIENCE_S)

    engine.at_reload = reload
    live.tick(0.0)
    assert paused.wait(PATIENCE_S)
    for _ in range(3):
        live.tick(0.0)
    assert world.events() == ["swap_overdue"]
    ended.set()
    live.tick(PATIENCE_S)
    assert world.live == 1
