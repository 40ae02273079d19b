"""The loop behind `evergreen up`: it starts the processes, restarts what dies, says what happens, and drains."""

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

import httpx

from evergreen.child import Child, ChildSpec
from evergreen.home import ChildState, write_states

TICK_S = 0.1
STATUS_EVERY_S = 5.0
READY_EVERY_S = 0.5
SLOW_START_S = 60.0

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


class Supervisor:
    """Single-threaded: PR_SET_PDEATHSIG is bound to the thread that starts a child.

    Args:
        home: its `logs/NAME.log` and `processes.json` are written.
        ready_url: asked until it answers 200; then `on_ready` is called, once.
        say: prints one line to the operator.
    """

    def __init__(
        self, home: Path, specs: Sequence[ChildSpec], *, ready_url: str, on_ready: Callable[[], None], say: Say
    ):
        self._home = home
        logs = home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.children = [Child(spec, home, logs / f"{spec.name}.log") for spec in specs]
        self._ready_url = ready_url
        self._on_ready = on_ready
        self._say = say
        self._stops = 0
        self._ready = False
        self._cannot_write = False
        self._next_status = self._next_look = 0.0

    def run(self) -> None:
        """Until SIGINT, SIGTERM or SIGHUP; a second one kills what has not ended yet."""
        heeded = [number for number in STOP_SIGNALS if not _is_ignored(number)]
        handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        started = monotonic()
        try:
            for child in self.children:
                self._start(child)
            while not self._stops:
                self._look_after_children()
                self._look_for_readiness(started)
                sleep(TICK_S)
            self._tell(
                "Stopping: running requests and the running update are given time to end; once more stops at once."
            )
            self._drain()
        finally:
            for child in self.children:
                child.kill()
            self._write_states()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1

    def _look_after_children(self) -> None:
        changed = False
        for child in self.children:
            if child.died():
                changed = True
                self._mourn(child)
            if child.restart_due:
                changed = True
                self._start(child)
        if changed or monotonic() > self._next_status:
            self._write_states()

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:  # no memory, no process left, a full disk: that passes
            child.note_death(f"could not be started ({error})")
            self._mourn(child)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # a terminal that is gone, or a full disk that output goes to
            self._say(line)

    def _mourn(self, child: Child) -> None:
        after = f"in {child.restart_delay_s:.0f} s" if child.restart_delay_s else "now"
        self._tell(f"{child.spec.name} {child.last_death}; it is started again {after}")
        if child.keeps_dying:
            self._tell(f"{child.spec.name} keeps dying. The end of {child.log}:")
            for line in child.last_lines():
                self._tell(f"    {line}")

    def _look_for_readiness(self, started: float) -> None:
        if self._ready or monotonic() < self._next_look:
            return
        self._next_look = monotonic() + READY_EVERY_S
        try:
            self._ready = httpx.get(self._ready_url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        except (httpx.HTTPError, httpx.InvalidURL):
            self._ready = False
        if self._ready:
            with suppress(OSError):
                self._on_ready()
        elif monotonic() - started > SLOW_START_S:
            self._next_look += SLOW_START_S / 4
            self._tell(
                f"not ready after {monotonic() - started:.0f} s; see {self._home / 'logs'} and `evergreen status`"
            )

    def _drain(self) -> None:
        """Phase by phase: the app first, so that requests end with their engine still there."""
        for phase in sorted({child.spec.stop_phase for child in self.children}):
            leaving = [child for child in self.children if child.spec.stop_phase == phase]
            for child in leaving:
                child.stop()
            while leaving and self._stops < 2:
                leaving = [child for child in leaving if not child.gone]
                sleep(TICK_S)

    def _write_states(self) -> None:
        """Rotates logs too. A disk that is full ends nobody: it is said once, until it works again."""
        self._next_status = monotonic() + STATUS_EVERY_S
        try:
            for child in self.children:
                child.rotate_log()
            write_states(self._home, [_state(child) for child in self.children])
        except OSError as error:
            if not self._cannot_write:
                self._tell(f"`evergreen status` is out of date: {self._home} cannot be written to ({error})")
            self._cannot_write = True
        else:
            self._cannot_write = False


def _is_ignored(number: signal.Signals) -> bool:
    """Who started this (nohup, a shell's background job) wants it to survive that signal. SIGTERM always ends it."""
    return number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN


def _state(child: Child) -> ChildState:
    return ChildState(
        name=child.spec.name,
        pid=child.pid,
        deaths=child.deaths,
        last_death=child.last_death,
        keeps_dying=child.keeps_dying,
        log=str(child.log),
        last_lines=child.last_lines() if child.keeps_dying else [],
    )
