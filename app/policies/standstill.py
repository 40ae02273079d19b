"""For how long one engine has stood still."""

from time import monotonic


class Standstill:
    """A stopwatch that is kept between passes over the engine: a swap that fails is undone, or tried again, in a later
    one, and what runs there stands still all the while."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before_s = 0.0

    def begins(self) -> None:
        """It is paused; it may have been already."""
        if self._since is None:
            self._since = monotonic()

    def ends(self) -> None:
        """It runs; it may have all along."""
        if self._since is not None:
            self._before_s += monotonic() - self._since
            self._since = None

    def take_ms(self) -> float:
        """Milliseconds since the last call, of all pauses that have ended."""
        taken_s, self._before_s = self._before_s, 0.0
        return 1e3 * taken_s
