"""What is going on, for whoever watches: a line that lives on a terminal, plain lines anywhere else."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

MOVING = 64
"""Length of the moving mean, rollouts."""


@dataclass
class Board:
    """The run at this moment. The player writes it, a display reads it."""

    phases: int
    rollouts_per_phase: int
    phase: int = 0
    answered: int = 0
    """Rollouts of this phase that have their reward."""
    answered_before: int = 0
    """Those of earlier phases."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=MOVING))
    """The last rewards of this phase."""
    version: int | None = None
    """Newest version that has answered."""
    waiting: str | None = None
    """Why nothing is asked at the moment."""
    failed: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Failed requests by phase and `request: kind`; phase 0 is before the first."""

    def start_phase(self, phase: int) -> None:
        self.phase = phase
        self.answered_before += self.answered
        self.answered = 0
        self.rewards.clear()

    def rewarded(self, reward: float) -> None:
        self.answered += 1
        self.rewards.append(reward)

    @property
    def answered_in_all(self) -> int:
        return self.answered_before + self.answered

    def request_failed(self, name: str) -> bool:
        """Count it; True the first time that this kind of failure occurs."""
        self.failed[self.phase][name] += 1
        return self.failed_in_all()[name] == 1

    def failed_in_all(self) -> Counter[str]:
        return sum(self.failed.values(), Counter())

    def line(self) -> str:
        parts = [f"phase {self.phase}/{self.phases}", f"{self.answered}/{self.rollouts_per_phase} rollouts"]
        if self.rewards:
            parts.append(f"mean of last {len(self.rewards)}: {sum(self.rewards) / len(self.rewards):.2f}")
        if self.version is not None:
            parts.append(f"version {self.version}")
        if failed := self.failed_in_all():
            kinds = ", ".join(f"{count} {kind}" for kind, count in failed.most_common(3))
            parts.append(f"{failed.total()} failed ({kinds})")
        if self.waiting:
            parts.append(self.waiting)
        return " | ".join(parts)


class Display:
    """Shows a board. `note` prints a line that stays."""

    def __init__(self, board: Board, console: Console, *, plain_every_s: float = 10.0) -> None:
        self._board = board
        self._console = console
        self._plain_every_s = plain_every_s

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        if self._console.is_terminal:
            with Live(console=self._console, get_renderable=lambda: Text(self._board.line()), transient=True):
                yield
            return
        lines = asyncio.create_task(self._plain_lines())
        try:
            yield
        finally:
            lines.cancel()

    async def _plain_lines(self) -> None:
        """A line every few seconds, and only if it says something new."""
        last = ""
        while True:
            await asyncio.sleep(self._plain_every_s)
            line = self._board.line()
            if line != last:
                self.note(line)
            last = line
