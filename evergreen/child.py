"""One process under the supervisor: started, logged, killed with its parent, restarted when it dies."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

RESTART_DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Before the first, second, ... restart within WINDOW_S; the last one repeats."""
WINDOW_S = 120.0
LOG_LIMIT_BYTES = 50_000_000

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class ChildSpec:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the parent's."""
    stop_phase: int = 0
    """On a drain, phase 0 stops first."""
    stop_within_s: float = 10.0
    """Killed when it has not ended this long after its SIGTERM."""


def die_with(parent: int) -> Callable[[], None]:
    """What a new child runs before its program: the kernel kills it when `parent` dies, even by SIGKILL (Linux)."""

    def before_exec() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return before_exec


class Child:
    def __init__(self, spec: ChildSpec, folder: Path, log: Path):
        """Args:
        folder: its working directory, which holds no Python package (Celery puts it first on sys.path).
        log: both its outputs are appended here.
        """
        self.spec = spec
        self.log = log
        self.deaths = 0
        self.last_death = ""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._recent_deaths: deque[float] = deque()
        self.restart_delay_s = 0.0
        self._restart_at = 0.0
        self._stopped_at: float | None = None

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def keeps_dying(self) -> bool:
        return self._deaths_lately() >= 3

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.spec.command,
                cwd=self._folder,
                env=os.environ | self.spec.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a group of its own: Ctrl-C reaches the supervisor alone, which stops the others in order. No session
                # of its own: Linux would schedule it as a group (sched(7), autogroup), and nice would mean nothing
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )

    def died(self) -> bool:
        """Whether it has died since the last call; then `restart_due` says when to start it again."""
        if self._process is None or self._process.poll() is None:
            return False
        self.note_death(_how(self._process.returncode))
        return True

    def note_death(self, how: str) -> None:
        """A start that failed counts too."""
        self.deaths += 1
        self.last_death = how
        self._process = None
        self._recent_deaths.append(monotonic())
        self.restart_delay_s = RESTART_DELAYS_S[min(self._deaths_lately(), len(RESTART_DELAYS_S)) - 1]
        self._restart_at = monotonic() + self.restart_delay_s

    @property
    def restart_due(self) -> bool:
        return self._process is None and monotonic() >= self._restart_at

    def stop(self) -> None:
        """Ask it to end; `gone` says when it has, and kills it when it takes too long."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self._stopped_at = monotonic()

    @property
    def gone(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return True
        if self._stopped_at is not None and monotonic() - self._stopped_at > self.spec.stop_within_s:
            self.kill()
        return False

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_lines(self, count: int = 15) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 8192))
                return file.read().decode(errors="replace").splitlines()[-count:]
        except OSError as error:
            return [f"({error})"]

    def rotate_log(self) -> None:
        """Keep one older log beside the current one; its writer appends, so it goes on at the new start."""
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
            os.truncate(self.log, 0)

    def _deaths_lately(self) -> int:
        while self._recent_deaths and monotonic() - self._recent_deaths[0] > WINDOW_S:
            self._recent_deaths.popleft()
        return len(self._recent_deaths)


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
