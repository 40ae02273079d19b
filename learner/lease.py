"""Keeping the lease on an update: a thread renews it while the main thread trains."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

import structlog
from sqlalchemy.exc import SQLAlchemyError

log = structlog.get_logger()

LEASE_TTL_S = 30.0
RENEW_EVERY_S = 5.0


class LeaseKeeper:
    """Renews a lease every `every_s` seconds from entry to exit.

    `lost` is set once the lease is known to be another's, or no renewal has succeeded for `ttl_s`: from then on the
    work is worth nothing. It only spares useless work; whether the lease still holds is decided by the commit.
    """

    def __init__(self, renew: Callable[[], bool], *, ttl_s: float = LEASE_TTL_S, every_s: float = RENEW_EVERY_S):
        """renew: extends the lease in the database; False = it is no longer ours. Runs in the keeper's thread."""
        self._renew = renew
        self._ttl_s = ttl_s
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.lost = threading.Event()

    def __enter__(self) -> "LeaseKeeper":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        renewed_at = time.monotonic()
        while not self._ended.wait(self._every_s):
            try:
                if not self._renew():
                    self.lost.set()
                    return
                renewed_at = time.monotonic()
            except (SQLAlchemyError, OSError) as error:  # OSError: SQLite's turn to write, a file's lock
                # a database that is away for a moment does not end the lease; its own clock does
                log.warning("lease_not_renewed", error=str(error))
                if time.monotonic() - renewed_at >= self._ttl_s:
                    self.lost.set()
                    return
