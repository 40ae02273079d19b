"""What SQLite needs to serve several processes: WAL, explicit BEGIN, and one queue for all writers."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Literal

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL, Connection

BUSY_TIMEOUT_S = 10.0
"""How long a statement waits for a lock held by something that does not queue with us (a backup, the sqlite3 shell)."""


class WriteTurn:
    """The turn to write: one holder among all threads and processes that use the database file.

    SQLite admits one writer. Its own way of waiting is to sleep up to 100 ms and look again, so a process that commits
    without a pause can starve the others until they fail with "database is locked". A lock on a file beside the
    database wakes the next one at once, and the kernel frees it when its holder dies, even by SIGKILL.
    """

    def __init__(self, database: Path) -> None:
        self._threads = Lock()
        self._holder: int | None = None
        self._file = os.open(f"{database}-write-turn", os.O_RDWR | os.O_CREAT, 0o600)

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._holder == get_ident():
            raise RuntimeError("a write transaction inside another one of the same thread would wait for ever")
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._holder = get_ident()
            try:
                yield
            finally:
                self._holder = None
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


def database_path(url: URL) -> Path:
    """The file behind a SQLite URL.

    Raises:
        ValueError: an in-memory database: it cannot be shared by threads and processes.
    """
    if not url.database or url.database == ":memory:" or url.query.get("mode") == "memory":
        raise ValueError("an in-memory SQLite database cannot be shared by processes; name a file: sqlite:///PATH")
    return Path(url.database)


def switch_to_wal(path: Path) -> None:
    """Turn on write-ahead logging; the file remembers it. The caller holds the write turn."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    finally:
        connection.close()
    if mode != "wal":
        raise OSError(f"SQLite cannot use write-ahead logging on {path} (it answers {mode!r}); use a local disk")


def configure(engine: Engine, *, begin: Literal["BEGIN", "BEGIN IMMEDIATE"], synchronous: str, read_only: bool) -> None:
    """Set every new connection's pragmas and take BEGIN away from the driver.

    The driver would begin a transaction late, at the first write, so that a read before it belongs to another snapshot
    (https://docs.sqlalchemy.org/en/21/dialects/sqlite.html#sqlite-transactions).
    """

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        if read_only:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
