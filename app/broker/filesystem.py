"""kombu's filesystem transport made safe between processes: nobody ever meets half a file.

kombu 5.7 writes messages and its exchange table in place, so a reader can find an empty or a truncated one, and it
claims a message by moving it to /tmp, which is a copy when that is another file system. Here every file is written
under a temporary name and put in place by `os.replace`, and a message is claimed by a rename within its queue's
directory, so exactly one reader gets it. Selected in app/celery_app.py by `broker_transport`.

Layout: <data_folder_in>/<queue>/<time>-<id>.msg and <control_folder>/<exchange>.exchange (JSON bindings).
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.transport.filesystem import exchange_queue_t
from kombu.transport.virtual import BrokerState
from kombu.utils.json import dumps, loads

_HIDDEN = "."
_SUFFIX = ".msg"


def _replace(target: Path, text: str, *, durable: bool) -> None:
    """Put `text` at `target` in one step; `durable` also survives power loss."""
    temporary = target.with_name(f"{_HIDDEN}tmp-{uuid4().hex}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, target)


class Channel(filesystem.Channel):
    def _queue_dir(self, queue: str) -> Path:
        if not self._is_valid_exchange_name(queue) or not queue:  # a queue names a directory: the same rule
            raise ChannelError(f"Invalid queue name: {queue!r}")
        folder = Path(self.data_folder_in) / queue
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _messages(self, queue: str) -> list[Path]:
        """Waiting messages, oldest first."""
        names = sorted(name for name in os.listdir(self._queue_dir(queue)) if name.endswith(_SUFFIX))
        return [self._queue_dir(queue) / name for name in names if not name.startswith(_HIDDEN)]

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]  # as in kombu's own
        name = f"{time.time_ns():020d}-{uuid4().hex}{_SUFFIX}"
        _replace(self._queue_dir(queue) / name, dumps(payload), durable=False)

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        for waiting in self._messages(queue):
            claimed = waiting.with_name(f"{_HIDDEN}claimed-{waiting.name}")
            try:
                os.rename(waiting, claimed)
            except FileNotFoundError:
                continue  # another reader took it, or a purge
            payload = loads(claimed.read_text(encoding="utf-8"))
            claimed.unlink(missing_ok=True)
            return payload
        raise Empty

    def _size(self, queue: str) -> int:
        return len(self._messages(queue))

    def _purge(self, queue: str) -> int:
        """Remove all waiting messages, and what a killed process left half done. Returns how many were waiting."""
        waiting = self._size(queue)
        for name in os.listdir(self._queue_dir(queue)):
            (self._queue_dir(queue) / name).unlink(missing_ok=True)
        return waiting

    @contextmanager
    def _table_lock(self) -> Iterator[None]:
        """One process at a time reads, changes and replaces an exchange table."""
        self.control_folder.mkdir(parents=True, exist_ok=True)
        with (self.control_folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def get_table(self, exchange: str) -> list[exchange_queue_t]:
        try:
            text = self._exchange_file(exchange).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [exchange_queue_t(*row) for row in loads(text)]

    def _queue_bind(self, exchange: str, routing_key: str | None, pattern: str | None, queue: str | None) -> None:
        row = exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with self._table_lock():
            table = self.get_table(exchange)
            if row not in table:
                _replace(self._exchange_file(exchange), dumps([row, *table]), durable=True)

    def _delete(
        self, queue: str, exchange: str, routing_key: str | None, pattern: str | None, *args: Any, **kwargs: Any
    ) -> None:
        self._purge(queue)
        row = exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with self._table_lock():
            table = self.get_table(exchange)
            if row in table:
                left = [other for other in table if other != row]
                _replace(self._exchange_file(exchange), dumps(left), durable=True)


class Transport(filesystem.Transport):
    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any):
        super().__init__(client, **kwargs)
        # kombu shares this between all connections of a process, and then binds nothing in a second folder
        self.state = BrokerState()
