from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service.fake_engine import FakeEngine
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World, found_world
from tests.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base-model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def engine_server(engine: FakeEngine) -> Iterator[Server]:
    with serving(engine.app) as server:
        yield server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, base_model: Path, engine_server: Server) -> Iterator[World]:
    """A gateway in front of the fake engine, which serves version 0 of the policy `default`."""
    world = found_world(tmp_path_factory.mktemp("home"), base_model, request_timeout_s=20)
    world.replica_id = world.add_replica(engine_server.url, 0)
    with serving(world.app) as server:
        world.url = server.url
        yield world
    world.database.close()


@pytest.fixture(autouse=True)
def _no_scripts_left(engine: FakeEngine) -> Iterator[None]:
    yield
    assert not engine.scripts, "a script was never used"
