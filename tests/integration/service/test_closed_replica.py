"""While an engine's own weights are swapped, requests wait; the fake engine says what it is sent and when."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from app.db.models import Replica
from tests.integration.service.fake_engine import FakeEngine, answer, refusal
from tests.integration.service.world import World

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def _trains_all_weights(world: World, engine: FakeEngine) -> Iterator[None]:
    world.change_policy(training="full")
    engine.bodies.clear()
    yield
    world.change_policy(training="lora")
    swap_began(world, None)


def swap_began(world: World, at: datetime | None) -> None:
    with world.database.write() as session:
        session.get_one(Replica, world.replica_id).swap_began_at = at


def chat(world: World, **changes: object) -> httpx.Response:
    with world.http() as http:
        return http.post("/v1/chat/completions", json={**CHAT, **changes})


def test_the_engine_is_asked_for_its_own_weights_and_whose_they_are(world: World, engine: FakeEngine):
    reply = chat(world)
    assert "model" not in engine.last
    assert engine.last["return_weight_versions"] is True
    row = world.interaction(reply.json()["id"])
    assert (row.version, row.version_runs, row.reason) == (0, None, None)


def test_an_adapter_is_asked_for_by_name(world: World, engine: FakeEngine):
    world.change_policy(training="lora")
    chat(world)
    assert engine.last["model"] == "default-v0"
    assert "return_weight_versions" not in engine.last


@pytest.mark.parametrize("model", ["default", "default@0"])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_wait_outside_and_are_answered(world: World, engine: FakeEngine, model: str, stream: bool):
    swap_began(world, datetime.now(UTC))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(chat, world, model=model, stream=stream) for _ in range(4)]
        done, _ = wait(calls, timeout=0.3)
        assert not done
        assert engine.bodies == []
        with world.http() as http:
            assert http.get("/readyz").status_code == 200
        swap_began(world, None)
        assert [call.result().status_code for call in calls] == [200] * 4
    assert len(engine.bodies) == 4


def test_asking_for_the_loaded_version_waits_too(world: World):
    swap_began(world, datetime.now(UTC))
    with ThreadPoolExecutor(1) as pool, world.http() as http:
        call = pool.submit(http.get, "/v1/models/default@0")
        done, _ = wait([call], timeout=0.3)
        assert not done
        assert http.get("/v1/models/default").status_code == 200
        swap_began(world, None)
        assert call.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_meets_the_pause_is_sent_again_after_it(world: World, engine: FakeEngine, stream: bool):
    """It was on its way when the replica was closed: vLLM 0.33 answers 503, as if its queue were full."""
    paused = refusal(503, "generation is paused")
    paused.before = lambda: swap_began(world, datetime.now(UTC))
    engine.scripts.extend([paused, answer("x")])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(chat, world, stream=stream)
        assert paused.arrived.wait(30)
        done, _ = wait([call], timeout=0.3)
        assert not done
        swap_began(world, None)
        assert call.result().status_code == 200
    assert len(engine.bodies) == 2


def test_a_full_queue_is_still_overload(world: World, engine: FakeEngine):
    engine.scripts.append(refusal(503, "The server is overloaded"))
    reply = chat(world)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "engine_overloaded")


def test_a_swap_that_nobody_is_at_any_more_is_not_waited_for(world: World, engine: FakeEngine):
    swap_began(world, datetime.now(UTC) - timedelta(hours=1))
    reply = chat(world)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "weights_swapping")
    assert reply.headers["retry-after"] == "2"
    assert engine.bodies == []


def test_what_another_version_sampled_is_that_versions(world: World, engine: FakeEngine):
    """It waited in the engine's queue while the weights were swapped."""
    assert world.replica_id is not None
    world.add_version(1, world.replica_id)
    engine.label = "default-v1"
    reply = chat(world, model="default@0")
    engine.label = "default-v0"
    assert reply.headers["x-policy-version"] == "0"
    assert world.interaction(reply.json()["id"]).version == 1
