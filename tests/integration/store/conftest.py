"""An empty, migrated database for every test, on SQLite and on PostgreSQL."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from app.db.models import Base
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
def postgres_store(postgres: str) -> Iterator[str]:
    with created(postgres) as url:
        database = Database(url)
        database.upgrade()
        database.close()
        yield url


@contextmanager
def created(server: str) -> Iterator[str]:
    """A new PostgreSQL database, dropped at the end."""
    name = f"evergreen_store_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield make_url(server).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


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
    url = request.getfixturevalue("postgres_store")
    yield url
    # creating and dropping a database takes a second each, deleting a test's few rows does not
    with psycopg.connect(url) as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)))


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
