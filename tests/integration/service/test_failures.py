"""What goes wrong between gateway and engine, or gateway and caller, and what is logged of it."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy.exc import OperationalError

from app.inference import interaction as interaction_module
from tests.integration.service.fake_engine import FakeEngine, Piece, Script, answer, held, refusal
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World, found_world

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "default", "messages": HELLO}
ABSENT = "The model `default-v0` does not exist."
UNREACHABLE = "http://127.0.0.1:1"
"""Nothing listens there; it sorts before every other url, so the router tries it first."""


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the gateway is about to log an abort; `world.newest` then sees it."""
    event = threading.Event()
    abort = interaction_module.abort_interaction

    def watched(*arguments: Any) -> None:
        event.set()
        abort(*arguments)

    monkeypatch.setattr(interaction_module, "abort_interaction", watched)
    return event


def chat(world: World, **changes: Any) -> httpx.Response:
    with world.http() as http:
        return http.post("/v1/chat/completions", json={**CHAT, **changes})


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_full_queue_is_429_with_retry_after(world: World, engine: FakeEngine):
    engine.scripts.append(refusal(503, "The server is overloaded"))
    reply = chat(world)
    assert error_of(reply) == (429, "engine_overloaded")
    assert reply.headers["retry-after"] == "1"
    row = world.newest()
    assert (row.state, row.reason) == ("aborted", "aborted")
    assert "queue is full" in row.detail


def test_a_full_queue_is_429_for_a_stream_too(world: World, engine: FakeEngine):
    engine.scripts.append(refusal(503, "The server is overloaded"))
    with pytest.raises(openai.RateLimitError):
        world.openai().chat.completions.create(**CHAT, stream=True)


def test_an_adapter_that_was_just_unloaded_is_retried_on_the_live_version(world: World, engine: FakeEngine):
    world.add_version(1, world.replica_id)
    gone = refusal(404, ABSENT)
    gone.before = lambda: world.set_live(1)
    engine.scripts.extend([gone, answer("new")])
    raw = world.openai().chat.completions.with_raw_response.create(**CHAT)
    world.set_live(0)
    assert raw.parse().choices[0].message.content == "new"
    assert raw.headers["x-policy-version"] == "1"
    assert world.interaction(raw.parse().id).version == 1
    assert [body["model"] for body in engine.bodies[-2:]] == ["default-v0", "default-v1"]


def test_an_adapter_that_stays_away_is_503(world: World, engine: FakeEngine):
    engine.scripts.extend([refusal(404, ABSENT), refusal(404, ABSENT)])
    reply = chat(world)
    assert error_of(reply) == (503, "policy_preparing")
    assert int(reply.headers["retry-after"]) > 0
    assert world.newest().state == "aborted"


def test_a_pinned_version_is_not_replaced_by_another(world: World, engine: FakeEngine):
    engine.scripts.append(refusal(404, ABSENT))
    assert error_of(chat(world, model="default@0")) == (404, "version_not_loaded")


def test_a_pinned_version_is_not_gone_because_no_engine_runs(world: World):
    world.set_live(1)
    world.set_replica(world.replica_id, healthy=False)
    existing, none = chat(world, model="default@0"), chat(world, model="default@7")
    world.set_replica(world.replica_id, healthy=True)
    world.set_live(0)
    assert error_of(existing) == (503, "no_replica")
    assert "version 0" in existing.json()["error"]["message"]
    assert int(existing.headers["retry-after"]) > 0
    assert error_of(none) == (404, "version_not_loaded")


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "seed must be positive", (400, "refused_by_engine")),
        (400, "This model's maximum context length is 64 tokens", (400, "context_length_exceeded")),
        (500, "CUDA error", (502, "engine_failed")),
    ],
)
def test_the_engines_errors(world: World, engine: FakeEngine, status: int, message: str, expected: tuple[int, str]):
    engine.scripts.append(refusal(status, message))
    reply = chat(world)
    assert error_of(reply) == expected
    assert message in reply.json()["error"]["message"]
    assert world.newest().state == "aborted"


def test_an_engine_that_breaks_off_leaves_what_was_sampled(world: World, engine: FakeEngine):
    engine.scripts.append(Script([Piece("half", [41])], breaks_off=True))
    assert error_of(chat(world)) == (502, "engine_failed")
    row = world.newest()
    assert (row.state, row.completion_ids.tolist(), row.logprobs.tolist()) == ("aborted", [41], [-0.5])


def test_a_stream_whose_engine_breaks_off_ends_with_an_error_event(world: World, engine: FakeEngine):
    engine.scripts.append(Script([Piece("half", [41])], breaks_off=True))
    stream = world.openai().chat.completions.create(**CHAT, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "half"]
    with pytest.raises(openai.APIError, match="The engine failed"):
        next(stream)
    assert world.newest().completion_ids.tolist() == [41]


def test_a_stream_that_cannot_be_stored_ends_with_an_error_event(world: World, monkeypatch: pytest.MonkeyPatch):
    """Its last chunk, which the commit precedes, is not sent."""

    def full(*_: Any) -> None:
        raise OperationalError("UPDATE interactions", {}, Exception("database or disk is full"))

    monkeypatch.setattr(interaction_module, "complete_interaction", full)
    chunks = world.openai().chat.completions.create(**CHAT, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="The database does not answer"):
        seen += [chunk.choices[0].finish_reason for chunk in chunks]
    assert "stop" not in seen
    assert world.newest().state == "aborted"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_an_error_and_not_trained(world: World, engine: FakeEngine, reason: str):
    """vLLM ends a request so that was aborted on its side; what stands there is no whole answer."""
    engine.scripts.append(Script([Piece("half", [41]), Piece("", [42], reason)]))
    reply = chat(world)
    assert error_of(reply) == (502, "engine_failed")
    assert reason in reply.json()["error"]["message"]
    row = world.newest()
    assert (row.state, row.reason) == ("aborted", "aborted")
    assert row.completion_ids.tolist() == [41, 42]
    assert row.response is None


def test_a_stream_that_the_engine_gave_up_ends_with_an_error_event(world: World, engine: FakeEngine):
    engine.scripts.append(Script([Piece("half", [41]), Piece("", [], "abort")]))
    stream = world.openai().chat.completions.create(**CHAT, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "half"]
    with pytest.raises(openai.APIError, match="The engine failed"):
        next(stream)
    row = world.newest()
    assert (row.state, row.completion_ids.tolist()) == ("aborted", [41])


@pytest.fixture
def unreachable(world: World) -> Iterator[None]:
    dead = world.add_replica(UNREACHABLE, 0)
    yield
    world.drop_replica(dead)


@pytest.mark.usefixtures("unreachable")
def test_a_replica_that_cannot_be_reached_is_got_around(world: World, engine_server: Server):
    reply = world.openai().chat.completions.create(**CHAT)
    assert reply.choices[0].message.content == "abc"
    assert world.interaction(reply.id).replica == engine_server.url


@pytest.mark.usefixtures("unreachable")
def test_no_replica_that_can_be_reached_is_503(world: World):
    world.set_replica(world.replica_id, healthy=False)
    reply = chat(world)
    world.set_replica(world.replica_id, healthy=True)
    assert error_of(reply) == (503, "engine_unreachable")
    assert int(reply.headers["retry-after"]) > 0
    assert world.newest().state == "aborted"


def test_a_policy_without_a_live_version_is_being_prepared(world: World):
    world.set_live(None)
    reply = chat(world)
    world.set_live(0)
    assert error_of(reply) == (503, "policy_preparing")
    assert int(reply.headers["retry-after"]) > 0


def test_a_reader_of_a_stream_that_disconnects(world: World, engine: FakeEngine, aborted: threading.Event):
    script = answer("one", "two", "three", first_id=41)
    gate = held(script, before=2)
    engine.scripts.append(script)
    with world.http() as http, http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        for line in reply.iter_lines():
            if "two" in line:
                break
    assert script.left.wait(20), "the engine's slot was not freed"
    assert aborted.wait(20)
    gate.set_result(None)
    row = world.newest()
    assert str(row.id) == reply.headers["x-interaction-id"]
    assert (row.state, row.reason, row.detail) == ("aborted", "aborted", "the client disconnected")
    assert row.completion_ids.tolist() == [41, 42]
    assert row.logprobs.tolist() == [-0.5, -0.5]
    assert row.response is None


def test_a_caller_without_a_stream_that_disconnects(world: World, engine: FakeEngine, aborted: threading.Event):
    script = answer("one", "two")
    gate = held(script, before=0)
    engine.scripts.append(script)
    with _request_on_a_socket(world):
        assert script.arrived.wait(20)
    assert script.left.wait(20), "the engine's slot was not freed"
    assert aborted.wait(20)
    gate.set_result(None)
    row = world.newest()
    assert (row.state, row.detail) == ("aborted", "the client disconnected")


def _request_on_a_socket(world: World) -> socket.socket:
    """A chat request whose connection the caller closes."""
    host, port = world.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(CHAT).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {world.secrets['all']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_a_completion_beyond_the_time_limit_is_stopped(tmp_path: Path, base_model: Path, engine: FakeEngine):
    script = answer("one", "two", first_id=41)
    gate = held(script, before=1)
    engine.scripts.append(script)
    world = found_world(tmp_path, base_model, request_timeout_s=0.5)
    with serving(engine.app) as engine_server, serving(world.app) as server:
        world.url = server.url
        world.add_replica(engine_server.url, 0)
        reply = chat(world)
        assert error_of(reply) == (504, "request_timeout")
        assert "0.5 s" in reply.json()["error"]["message"]
        assert script.left.wait(20)
        gate.set_result(None)
        row = world.newest()
    assert (row.state, row.completion_ids.tolist()) == ("aborted", [41])
    world.database.close()


def test_a_stop_lets_running_requests_end(tmp_path: Path, base_model: Path, engine: FakeEngine):
    script = answer("one", "two")
    gate = held(script, before=1)
    engine.scripts.append(script)
    world = found_world(tmp_path, base_model)
    with serving(engine.app) as engine_server, ThreadPoolExecutor(1) as pool:
        with serving(world.app) as server:
            world.url = server.url
            world.add_replica(engine_server.url, 0)
            running = pool.submit(chat, world)
            assert script.arrived.wait(20)
            server.ask_to_stop()
            gate.set_result(None)
        reply = running.result(20)
    assert reply.status_code == 200
    assert world.interaction(reply.json()["id"]).state == "completed"
    world.database.close()


def test_a_stop_that_cannot_wait_leaves_aborted_rows(tmp_path: Path, base_model: Path, engine: FakeEngine):
    script = answer("one", "two", first_id=41)
    gate = held(script, before=1)
    engine.scripts.append(script)
    world = found_world(tmp_path, base_model)
    with serving(engine.app) as engine_server, world.http() as http:
        with serving(world.app, drain_s=1) as server:
            world.add_replica(engine_server.url, 0)
            request = http.build_request("POST", f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True})
            reply = http.send(request, stream=True)
            lines = reply.iter_lines()
            assert any("one" in line for line in lines)
        gate.set_result(None)
    (row,) = world.all_interactions()
    assert (row.state, row.detail) == ("aborted", "the server stopped before the end")
    assert row.completion_ids.tolist() == [41]
    world.database.close()
