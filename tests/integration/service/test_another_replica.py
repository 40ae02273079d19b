"""Of several replicas one cannot serve a request: as long as no token has come, another is tried."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.integration.service.fake_engine import FakeEngine, Piece, Script, refusal
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


def full() -> Script:
    return refusal(503, "The server is overloaded")


def reset() -> Script:
    """The connection breaks before the first token."""
    return Script([], breaks_off=True)


def restarted() -> Script:
    """The engine has lost its adapters, and nobody has looked at it since."""
    return refusal(404, "The model `default-v0` does not exist.")


UNABLE = pytest.mark.parametrize(
    ("unable", "status", "code"), [(full, 429, "engine_overloaded"), (reset, 502, "engine_failed")]
)


@pytest.fixture
def tried_first(world: World) -> Iterator[FakeEngine]:
    """A second engine; of replicas with as few requests the one whose URL sorts first is chosen, which is its."""
    engine = FakeEngine()
    with serving(engine.app) as server:
        replica_id = world.add_replica(server.url.replace("127.0.0.1", "0.0.0.0"), 0)
        yield engine
        world.drop_replica(replica_id)


def chat(world: World, **changes: object) -> httpx.Response:
    with world.http() as http:
        return http.post("/v1/chat/completions", json={**CHAT, **changes})


@UNABLE
@pytest.mark.parametrize("model", ["default", "default@0"])
def test_it_is_got_around(
    world: World, engine_server: Server, tried_first: FakeEngine, unable: Callable[[], Script], status: int, code: str,
    model: str,
):  # fmt: skip
    tried_first.scripts.append(unable())
    reply = chat(world, model=model)
    assert (reply.status_code, len(tried_first.bodies)) == (200, 1)
    assert reply.json()["choices"][0]["message"]["content"] == "abc"
    row = world.interaction(reply.json()["id"])
    assert (row.replica, row.completion_ids.tolist()) == (engine_server.url, [10, 11, 12])


@UNABLE
def test_it_is_got_around_by_a_stream(
    world: World, tried_first: FakeEngine, unable: Callable[[], Script], status: int, code: str
):
    tried_first.scripts.append(unable())
    stream = world.openai().chat.completions.create(**CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "abc"


@UNABLE
def test_none_is_left(
    world: World, engine: FakeEngine, tried_first: FakeEngine, unable: Callable[[], Script], status: int, code: str
):
    tried_first.scripts.append(unable())
    engine.scripts.append(unable())
    reply = chat(world)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert world.newest().state == "aborted"


def test_after_the_first_token_none_is_tried(world: World, engine: FakeEngine, tried_first: FakeEngine):
    tried_first.scripts.append(Script([Piece("half", [41])], breaks_off=True))
    asked = len(engine.bodies)
    reply = chat(world)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_failed")
    assert len(engine.bodies) == asked
    assert world.newest().completion_ids.tolist() == [41]


@pytest.mark.parametrize("model", ["default", "default@0"])
def test_one_that_was_restarted_is_got_around_however_idle_it_is(world: World, tried_first: FakeEngine, model: str):
    tried_first.scripts += [restarted(), restarted()]
    for asked in (1, 2):
        assert chat(world, model=model).status_code == 200
        assert len(tried_first.bodies) == asked


def test_an_engine_that_lost_a_pinned_version_alone_says_so(world: World, engine: FakeEngine):
    engine.scripts.append(restarted())
    reply = chat(world, model="default@0")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "version_not_loaded")
