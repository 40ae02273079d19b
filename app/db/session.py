"""The database as a process uses it: short write transactions, and reads that see one snapshot."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, make_url
from sqlalchemy.orm import Session

from app.db import sqlite
from app.db.migrate import migrate

READ_CONNECTIONS = 12
WRITE_CONNECTIONS = 4
"""Per process. Apart, so that a crowd of readers cannot keep the writer from a connection."""
CONNECTION_WAIT_S = 30.0


class Database:
    """One per process, opened after any fork; its methods may be called from any thread.

    Args:
        url: sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME (psycopg 3).
        sqlite_synchronous: NORMAL survives kill -9 of any process; FULL survives power loss too.
    """

    def __init__(self, url: str, *, sqlite_synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> None:
        self.url = make_url(url)
        self._turn: sqlite.WriteTurn | None = None
        if self.url.get_backend_name() == "sqlite":
            self._open_sqlite(sqlite_synchronous)
        elif self.url.get_backend_name() == "postgresql":
            self._open_postgresql()
        else:
            raise ValueError(f"{self.url.get_backend_name()} is not supported; use sqlite:///PATH or postgresql://...")

    def _open_sqlite(self, synchronous: str) -> None:
        path = sqlite.database_path(self.url)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._turn = sqlite.WriteTurn(path)
        with self._turn.held():
            sqlite.switch_to_wal(path)
        arguments = {"connect_args": {"timeout": sqlite.BUSY_TIMEOUT_S}}
        self._writing = _engine(self.url, WRITE_CONNECTIONS, arguments)
        self._reading = _engine(self.url, READ_CONNECTIONS, arguments)
        sqlite.configure(self._writing, begin="BEGIN IMMEDIATE", synchronous=synchronous, read_only=False)
        sqlite.configure(self._reading, begin="BEGIN", synchronous=synchronous, read_only=True)

    def _open_postgresql(self) -> None:
        url = self.url.set(drivername="postgresql+psycopg")
        arguments = {"pool_pre_ping": True, "isolation_level": "READ COMMITTED"}
        self._writing = _engine(url, WRITE_CONNECTIONS, arguments)
        reading = _engine(url, READ_CONNECTIONS, arguments | {"isolation_level": "REPEATABLE READ"})
        self._reading = reading.execution_options(postgresql_readonly=True)

    @contextmanager
    def write_connection(self) -> Iterator[Connection]:
        """One write transaction, for callers that nest sessions in it; commits on success, else rolls back."""
        turn: AbstractContextManager[None] = self._turn.held() if self._turn else nullcontext()
        with self._writing.connect() as connection, turn, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One write transaction; commits on success, else rolls back. What it loaded stays readable afterwards."""
        with self.write_connection() as connection, Session(connection, expire_on_commit=False) as session:
            yield session
            session.flush()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One snapshot of the database, however many queries it takes. Nothing can be written through it."""
        with self._reading.connect() as connection, Session(connection, expire_on_commit=False) as session:
            yield session

    def upgrade(self) -> None:
        """Bring the schema to the newest migration; does nothing where it is. Safe if several processes call it."""
        with self.write_connection() as connection:
            migrate(connection)

    def close(self) -> None:
        self._reading.dispose()
        self._writing.dispose()
        if self._turn:
            self._turn.close()


def _engine(url: URL, connections: int, arguments: dict[str, Any]) -> Engine:
    return create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=CONNECTION_WAIT_S,
        pool_use_lifo=True,
        json_serializer=_to_json,
        **arguments,
    )


def _to_json(value: Any) -> str:
    # PostgreSQL refuses NaN and infinity in JSON, SQLite would keep them: refused alike
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
