"""The home directory of one embedded server: who holds it, and what its supervisor says of its processes."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

PROBED_S = 0.5
"""Longer than a look at the lock takes."""


class HomeInUse(RuntimeError):
    """Another process holds the home; the message names it."""


class HomeLock:
    """Held while `up` runs and while `reset` deletes. The kernel lets go of it when its holder dies."""

    def __init__(self, home: Path):
        """
        Raises:
            HomeInUse: somebody else holds it.
        """
        home.mkdir(parents=True, exist_ok=True)
        self._file = (home / "up.lock").open("a+")
        if not self._locked():
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise HomeInUse(
                f"{home} is in use by process {holder}. Stop that one first, or choose another EVERGREEN_HOME."
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def _locked(self) -> bool:
        """A look by `is_held` takes a moment; a holder stays."""
        until = monotonic() + PROBED_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic() > until:
                    return False
                sleep(PROBED_S / 10)
            else:
                return True

    def release(self) -> None:
        self._file.close()


def is_held(home: Path) -> bool:
    """Looks without taking the home: the shared lock keeps no other look away, and a new holder waits for it."""
    if not (home / "up.lock").exists():
        return False
    with (home / "up.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class ChildState:
    name: str
    pid: int | None
    deaths: int
    last_death: str
    keeps_dying: bool
    log: str
    last_lines: list[str]
    """Of its log, when it keeps dying."""


def write_states(home: Path, states: list[ChildState]) -> None:
    """Put the supervisor's account of its processes in place in one step."""
    temporary = home / f".tmp-processes-{uuid4().hex}"
    try:
        temporary.write_text(json.dumps([asdict(state) for state in states], indent=1))
        os.replace(temporary, home / "processes.json")
    finally:
        temporary.unlink(missing_ok=True)  # half of it, where the disk is full


def read_states(home: Path) -> list[ChildState]:
    path = home / "processes.json"
    return [ChildState(**state) for state in json.loads(path.read_text())] if path.exists() else []
