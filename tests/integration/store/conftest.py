"""A fresh database for every test, on SQLite and on PostgreSQL, copied from one that was migrated once."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from app.db.session import Database
from tests.integration.store.world import World
from tests.postgres import postgres_server

_numbers = itertools.count()

BACKENDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres") / "server") as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    database.close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres: str) -> Iterator[str]:
    with created(postgres) as url:
        database = Database(url)
        database.upgrade()
        database.close()
        yield str(make_url(url).database)


class created:  # noqa: N801 (used as a function)
    """A new PostgreSQL database, dropped at the end."""

    def __init__(self, server: str, template: str = "template1") -> None:
        self.server = server
        self.name = f"evergreen_store_{os.getpid()}_{next(_numbers)}"
        self.template = template

    def __enter__(self) -> str:
        self._run(f"CREATE DATABASE {self.name} TEMPLATE {self.template}")
        return make_url(self.server).set(database=self.name).render_as_string(hide_password=False)

    def __exit__(self, *_: object) -> None:
        self._run(f"DROP DATABASE {self.name} WITH (FORCE)")

    def _run(self, statement: str) -> None:
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without any table."""
    if backend == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    with created(request.getfixturevalue("postgres")) as url:
        yield url


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated, empty database."""
    if backend == "sqlite":
        path = tmp_path / "store.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server, template = request.getfixturevalue("postgres"), request.getfixturevalue("postgres_template")
    with created(server, template) as url:
        yield url


@pytest.fixture
def open_database(url: str) -> Iterator[Callable[[], Database]]:
    """Opens the test's database once more, as another process would."""
    opened: list[Database] = []

    def open_() -> Database:
        opened.append(Database(url))
        return opened[-1]

    yield open_
    for database in opened:
        database.close()


@pytest.fixture
def database(open_database: Callable[[], Database]) -> Database:
    return open_database()


@pytest.fixture
def world(database: Database) -> World:
    return World(database)
