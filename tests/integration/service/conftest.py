import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from tests.integration.service.fake_engine import FakeEngine
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World, found_world
from tests.postgres import postgres_server
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


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """None: the embedded default, SQLite in the world's home."""
    if request.param == "sqlite":
        yield None
        return
    name = sql.Identifier(f"evergreen_service_{os.getpid()}")
    with (
        postgres_server(tmp_path_factory.mktemp("postgres") / "server") as server,
        psycopg.connect(server, autocommit=True) as admin,
    ):
        admin.execute(sql.SQL("CREATE DATABASE {}").format(name))
        yield make_url(server).set(database=name.as_string(admin).strip('"')).render_as_string(hide_password=False)
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, base_model: Path, engine_server: Server, database_url: str | None
) -> Iterator[World]:
    """A gateway in front of the fake engine, which serves version 0 of the policy `default`."""
    world = found_world(tmp_path_factory.mktemp("home"), base_model, url=database_url, request_timeout_s=20)
    world.replica_id = world.add_replica(engine_server.url, 0)
    with serving(world.app) as server:
        world.url = server.url
        yield world
    world.database.close()


@pytest.fixture(autouse=True)
def _no_scripts_left(engine: FakeEngine) -> Iterator[None]:
    yield
    assert not engine.scripts, "a script was never used"
