"""Whose turn it is on a replica: one process at a time works on an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.db.models import Replica
from app.db.repositories import replicas
from app.db.session import Database

OWNED_S = 20.0
"""Renewed while the pass runs."""

log = structlog.get_logger()


class Ownership:
    """Of one replica by one process, as its row says it."""

    def __init__(self, database: Database, replica: Replica, owner: str):
        self._database = database
        self._replica = replica
        self._owner = owner

    def take(self) -> bool:
        """Own it, or own it for as long again. False: another process is at work on it."""
        with self._database.write() as session:
            return replicas.take_replica(session, self._replica.id, self._owner, OWNED_S)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Given up after the block. One call may take longer than an ownership lasts, which is short so that a killed
        process blocks nobody."""
        ended = Event()

        def renew() -> None:
            while not ended.wait(OWNED_S / 4):
                try:
                    self.take()
                except SQLAlchemyError as error:
                    log.warning("replica_not_renewed", replica=self._replica.url, error=str(error))

        keeper = Thread(target=renew, name="replica-owner", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()
            with self._database.write() as session:
                replicas.release_replica(session, self._replica.id, self._owner)
