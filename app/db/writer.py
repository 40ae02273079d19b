"""Group commit: the one thread of a process that writes. What has queued meanwhile shares a transaction."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Any, TypeVar
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from app.db.session import Database
from app.errors import Unavailable

T = TypeVar("T")

MAX_QUEUED = 4096
MAX_GROUP = 128
"""Items in one transaction: bounds how long a lock is held and how much is replayed."""
REPLAYS = 5
CONFLICTS = frozenset({"40001", "40P01"})
"""PostgreSQL's serialization_failure and deadlock_detected: the transaction may be repeated as it is."""

log = structlog.get_logger(__name__)


class WriterFull(Unavailable):
    def __init__(self) -> None:
        super().__init__(
            f"{MAX_QUEUED} writes wait for the database; try again in a few seconds.",
            code="store_overloaded",
            headers={"Retry-After": "2"},
        )


class WriterStopped(Unavailable):
    def __init__(self) -> None:
        super().__init__("The server is shutting down; try again.", code="shutting_down", headers={"Retry-After": "5"})


class StoreUnavailable(Unavailable):
    def __init__(self) -> None:
        super().__init__(
            "The database does not answer, so the write was not confirmed. Try again in a few seconds.",
            code="store_unavailable",
            headers={"Retry-After": "5"},
        )


class WriterDied(Unavailable):
    """A mistake in this code has ended the thread. Only a new process writes again."""

    def __init__(self) -> None:
        super().__init__(
            "This server can write nothing any more: its operator must restart it (its log says why).",
            code="store_unavailable",
            headers={"Retry-After": "30"},
        )


@dataclass(frozen=True)
class _Item:
    work: Callable[[Session], Any]
    order: UUID
    future: Future[Any]


class Writer:
    """Runs submitted work in groups: one transaction a group, one savepoint an item.

    An item that raises is undone alone and its error goes to its own future. Items are sorted by `order` (the id of the
    rollout they lock), so that two processes lock rollouts in one order; should their transactions clash all the same,
    the whole group is run again: work must have no effect but on its session. What the database or the disk does to a
    group fails that group; an error that nobody foresaw ends the writer, and from then on every write is refused.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: Queue[_Item | None] = Queue(MAX_QUEUED)
        self._thread = Thread(target=self._run, name="writer", daemon=True)
        self._accepting = Lock()
        self._stopped = False
        self._died = False

    @property
    def died(self) -> bool:
        """No write is possible in this process any more."""
        return self._died

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Accept nothing more, commit what is queued, end the thread."""
        with self._accepting:
            already, self._stopped = self._stopped, True
        if not already:
            self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, work: Callable[[Session], T], *, order: UUID) -> Future[T]:
        """Queue `work`; the future resolves after its COMMIT, or with what it raised.

        Raises:
            WriterFull: too much is queued. WriterStopped: after `stop`. WriterDied: see `died`.
        """
        item = _Item(work, order, Future())
        with self._accepting:
            if self._died:
                raise WriterDied()
            if self._stopped:
                raise WriterStopped()
            try:
                self._queue.put_nowait(item)
            except Full:
                raise WriterFull() from None
        return item.future

    def _run(self) -> None:
        try:
            self._write_groups()
        except BaseException:
            # whoever waits must hear of it: without this thread their futures would never resolve
            log.exception("writer_died")
            self._die()
            raise

    def _die(self) -> None:
        with self._accepting:
            self._died = True
        # nothing is added any more
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item and item.future.set_running_or_notify_cancel():
                item.future.set_exception(WriterDied())

    def _write_groups(self) -> None:
        stopping = False
        while not stopping:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP and group[-1] is not None:
                try:
                    group.append(self._queue.get_nowait())
                except Empty:
                    break
            stopping = group[-1] is None
            # a caller may have given up (its future is cancelled) before its turn
            items = [item for item in group if item and item.future.set_running_or_notify_cancel()]
            if items:
                self._commit(sorted(items, key=lambda item: item.order))

    def _commit(self, items: list[_Item]) -> None:
        for attempt in range(REPLAYS + 1):
            try:
                with self._database.write_connection() as connection:
                    results = [_run_item(connection, item) for item in items]
            except (SQLAlchemyError, OSError) as error:  # OSError: the turn to write, a file's lock, was not to be had
                if _is_conflict(error) and attempt < REPLAYS:
                    log.info("write_group_replayed", items=len(items), attempt=attempt + 1)
                    continue
                log.exception("write_group_failed", items=len(items))
                unavailable = StoreUnavailable()
                unavailable.__cause__ = error
                for item in items:
                    item.future.set_exception(unavailable)
                return
            except BaseException:
                for item in items:
                    item.future.set_exception(WriterDied())
                raise
            for item, (result, raised) in zip(items, results, strict=True):
                if raised is None:
                    item.future.set_result(result)
                else:
                    item.future.set_exception(raised)
            return


def _run_item(connection: Connection, item: _Item) -> tuple[Any, Exception | None]:
    """Run one item in its own savepoint; what it raises is its own affair, unless the transaction is lost with it."""
    with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as session:
        try:
            result = item.work(session)
            session.commit()
        except Exception as error:
            if isinstance(error, DBAPIError) and (
                _is_conflict(error) or error.connection_invalidated or _was_rolled_back(connection)
            ):
                raise
            session.rollback()
            return None, error
        return result, None


def _was_rolled_back(connection: Connection) -> bool:
    """Whether the database ended the whole transaction by itself, as SQLite does when the disk is full: what earlier
    items wrote is gone then, and later ones would commit on their own."""
    in_transaction = getattr(connection.connection.dbapi_connection, "in_transaction", True)  # sqlite3 alone tells
    return not in_transaction


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in CONFLICTS
