"""Policies that train all weights: an engine's own are swapped. On both databases, against engines over HTTP."""

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select, update

from app.db.models import Event, Policy, Replica
from app.db.repositories import swaps
from app.db.repositories.policies import create_policy
from app.db.repositories.serving import served_policies
from app.db.session import Database
from app.engine import replicas as routing
from app.engine.replicas import Router, WeightsSwapping
from app.errors import Conflict, NotFound
from app.policies.deploy import Deployer
from app.policies.learning import LearningSettings
from app.rollouts.states import DeploymentState, VersionStatus
from tests.integration.control.conftest import Make, World, pick
from tests.integration.control.fake_engine import FakeEngine
from tests.integration.control.swapping import PATIENCE_S, let_time_pass, swap_calls


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    return World(database, tmp_path / "versions", training="full")


def test_versions_replace_each_other(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.add_version(1)
    live.tick(PATIENCE_S)
    assert (world.live, world.status(0), world.status(1)) == (1, VersionStatus.RETIRED, VersionStatus.LIVE)
    assert engine.calls == swap_calls("default-v1")
    one = world.deployment(1)
    assert (one.state, one.verdict) == (DeploymentState.VERIFIED, "verified")
    assert one.score == pytest.approx(1.0, abs=0.05)
    assert one.paused_ms is not None
    assert one.closed_ms is not None
    assert 0 < one.paused_ms <= one.closed_ms, "nothing new comes before the canary's verdict"
    assert world.deployment(0).state == DeploymentState.UNLOADED
    live.tick(PATIENCE_S)
    replica = world.replica(engine.url)
    assert (replica.weights, replica.swap_began_at) == ("default-v1", None)

    route = pick(Router(world.database), world.policy_id)
    assert (route.url, route.version, route.model, route.own_weights) == (engine.url, 1, None, True)
    assert pick(Router(world.database), world.policy_id, 1).version == 1
    with pytest.raises(NotFound, match="one version at a time") as gone:
        pick(Router(world.database), world.policy_id, 0)
    assert gone.value.code == "version_not_loaded"


def test_requests_wait_for_the_end_of_a_swap(world: World, engine: FakeEngine, live: Deployer) -> None:
    """They come while the engine is paused; the replica is closed before that, and ready all the while."""
    world.add_version(1)
    paused, go_on = threading.Event(), threading.Event()

    def at_reload() -> None:
        paused.set()
        assert go_on.wait(30)

    engine.at_reload = at_reload
    router = Router(world.database)

    async def body() -> list[object]:
        ticking = asyncio.create_task(asyncio.to_thread(live.tick, PATIENCE_S))
        await asyncio.to_thread(paused.wait, 30)
        with world.database.read() as session:
            assert served_policies(session) == ["default"]
            with pytest.raises(WeightsSwapping):
                routing.candidates(session, world.policy_id, None)
        calls = [asyncio.create_task(router.pick(world.policy_id, number)) for number in (None, None, 1, 0)]
        done, _ = await asyncio.wait(calls, timeout=0.3)
        assert not done
        go_on.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await ticking
        return results

    first, second, pinned, old = asyncio.run(body())
    assert [route.version for route in (first, second, pinned)] == [1, 1, 1]
    assert isinstance(old, NotFound)


def test_nobody_waits_for_ever(
    world: World, engine: FakeEngine, live: Deployer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "SWAP_WAIT_S", 0.2)
    with world.database.write() as session:
        session.execute(update(Replica).values(swap_began_at=datetime.now(UTC)))
    with pytest.raises(WeightsSwapping) as waited:
        pick(Router(world.database), world.policy_id)
    assert (waited.value.status, waited.value.code) == (429, "weights_swapping")
    assert waited.value.headers == {"Retry-After": "2"}
    with world.database.write() as session:
        session.execute(update(Replica).values(swap_began_at=datetime(2020, 1, 1, tzinfo=UTC)))
    monkeypatch.setattr(routing, "SWAP_WAIT_S", 1000.0)
    with pytest.raises(WeightsSwapping):
        pick(Router(world.database), world.policy_id)  # at once: whoever began it is long gone


def test_a_restarted_engine_is_brought_back_to_live(world: World, engine: FakeEngine, live: Deployer) -> None:
    world.add_version(1)
    live.tick(PATIENCE_S)
    world.measure_noise()
    engine.restart()
    engine.calls.clear()
    live.tick(PATIENCE_S)
    assert engine.calls == swap_calls("default-v1")
    assert (world.deployment(1).state, world.deployment(1).verdict) == (DeploymentState.VERIFIED, "verified")
    assert world.deployment(1).score == pytest.approx(1.0, abs=0.05), "against what it said under version 0"

    engine.restart()
    engine.serves_instead["default-v1"] = str(world.path(0))
    live.tick(PATIENCE_S)
    assert world.deployment(1).state == DeploymentState.FAILED, "a reload that did nothing is not taken for the version"


@pytest.mark.parametrize(
    ("lacks", "tells", "why"), [({"/pause"}, True, "VLLM_SERVER_DEV_MODE=1"), (set(), False, "vLLM tells it from 0.33")]
)
def test_an_engine_that_cannot_do_it_says_what_to_do(
    world: World, engine: FakeEngine, deployer: Make, lacks: set[str], tells: bool, why: str
) -> None:
    engine.lacks, engine.tells_versions = lacks, tells
    deployer(engine.url).tick(PATIENCE_S)
    assert world.live is None
    assert why in str(world.deployment(0).error)


def test_replicas_are_swapped_one_after_the_other_and_requests_go_where_something_is_served(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url, second_engine.url).tick
    for _ in range(3):
        tick(PATIENCE_S)
    assert world.live == 0
    world.add_version(1)
    second_engine.rejects.add("default-v1")
    for _ in range(3):
        tick(PATIENCE_S)
    assert world.live == 0, "not before it is verified everywhere"
    with world.database.read() as session:
        rows = {row.url: row.version for row in routing.candidates(session, world.policy_id, None)}
    assert rows == {engine.url: 1, second_engine.url: 0}, "the first has nothing else any more"
    second_engine.rejects.clear()
    let_time_pass(world)
    tick(PATIENCE_S)
    assert world.live == 1


def test_a_swap_that_takes_long_holds_up_the_other_replicas_for_as_long(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    """Not so a closed one that nobody is at work on."""
    one = deployer(engine.url, second_engine.url)
    for _ in range(3):
        one.tick(PATIENCE_S)
    world.add_version(1)
    first, second = world.replica(engine.url), world.replica(second_engine.url)
    closed: list[bool] = []

    def look() -> None:
        with world.database.write() as session:
            session.execute(update(Replica).values(swap_began_at=datetime(2020, 1, 1, tzinfo=UTC)))
            session.execute(update(Replica).where(Replica.id == second.id).values(owned_until=None))
        with world.database.write() as session:
            closed.append(swaps.another_is_closed(session, second.id, world.policy_id))
            closed.append(swaps.another_is_closed(session, first.id, world.policy_id))
            session.get_one(Replica, second.id).swap_began_at = None

    engine.at_reload = look
    for _ in range(3):  # either replica can be the first
        one.tick(PATIENCE_S)
    assert closed[:2] == [True, False]


def test_while_one_replica_is_closed_the_others_serve(
    world: World, engine: FakeEngine, second_engine: FakeEngine, deployer: Make
) -> None:
    tick = deployer(engine.url, second_engine.url).tick
    for _ in range(3):
        tick(PATIENCE_S)
    world.add_version(1)
    open_ones: list[int] = []

    def count_open() -> None:
        with world.database.read() as session:
            open_ones.append(len(routing.candidates(session, world.policy_id, None)))

    engine.at_reload = second_engine.at_reload = count_open
    for _ in range(3):
        tick(PATIENCE_S)
    assert world.live == 1
    assert open_ones == [1, 1]


@pytest.mark.parametrize(("first", "second"), [("full", "lora"), ("lora", "full"), ("full", "full")])
def test_two_policies_on_one_engine_are_refused_where_one_of_them_trains_all_weights(
    database: Database, first: str, second: str
) -> None:
    settings = LearningSettings()
    with database.write() as session:
        create_policy(session, name="one", base_model="/base", settings=settings, training=first)  # type: ignore[arg-type]
    with database.write() as session, pytest.raises(Conflict, match="'one' uses the base model /base") as refused:
        create_policy(session, name="two", base_model="/base", settings=settings, training=second)  # type: ignore[arg-type]
    assert refused.value.code == "base_model_not_shareable"
    with database.write() as session:
        create_policy(session, name="two", base_model="/another", settings=settings, training=second)  # type: ignore[arg-type]


def test_a_crowded_engine_keeps_its_adapters_and_says_so(
    world: World, engine: FakeEngine, deployer: Make, tmp_path: Path
) -> None:
    """Rows that came another way: the LoRA policy is served, the other one is not, and an event says it once."""
    other = World(world.database, tmp_path / "other", name="other")
    one = deployer(engine.url)
    for _ in range(2):
        one.tick(PATIENCE_S)
    with world.database.read() as session:
        live = {policy.name: policy.live for policy in session.scalars(select(Policy))}
        events = session.scalars(select(Event.kind)).all()
    assert live == {"default": None, "other": 0}
    assert engine.calls == []
    assert other.name == "other"
    assert list(events) == ["full_policy_not_alone"]
