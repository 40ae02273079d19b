"""Did the environment change? A drift detector on what the critic did not expect: the residuals R - V, divided by the
number of rewards in R (learner/advantages.py).

R falls when the environment changes under a policy; V, learned on what was before, does not follow at once. A change of
R that the critic expected (hard prompts come and go) is none. ADWIN (Bifet and Gavalda 2007, river's implementation)
compares the mean of every older with every newer part of its window: no length of a window and no size of a change is
to be set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from river.drift import ADWIN

DELTA = 0.002
"""ADWIN's bound on the chance of a false alarm per comparison (river's default)."""
RESIDUALS_KEPT = 1024


@dataclass(frozen=True)
class Drift:
    """A change of the residuals' mean, noticed in one batch."""

    before: float
    """Mean residual of the rollouts since the last drift, in units of reward."""
    batch: float
    """That of the batch, whose first rollouts may be from before the change."""

    def in_words(self) -> str:
        way = "less" if self.batch < self.before else "more"
        return (
            f"rewards became {way} than the critic expects: reward - value is {self.batch:+.2f} on average over this "
            f"update's rollouts, and was {self.before:+.2f} before"
        )


class Window:
    """The residuals since the last drift, oldest first, and a detector that has seen them."""

    def __init__(self, residuals: Sequence[float], reward_range: float) -> None:
        """reward_range: reward_max - reward_min; ADWIN's bound is that of values within an interval of length 1."""
        self._reward_range = reward_range
        self._begin()
        for residual in residuals:
            self.add(residual)

    def _begin(self) -> None:
        self.residuals: list[float] = []
        self._detector = ADWIN(delta=DELTA, clock=1)

    def add(self, residual: float) -> bool:
        """Whether the mean has changed. Then the window begins anew: ADWIN itself gives up what lay before the change
        bit by bit, and would report it as often."""
        self.residuals.append(residual)
        self._detector.update(residual / self._reward_range)
        if self._detector.drift_detected:
            self._begin()
            return True
        return False


def find_drift(
    earlier: Sequence[float], batch: Sequence[float], reward_range: float
) -> tuple[Drift | None, list[float]]:
    """The drift that a batch shows, if any, and what is to be passed as `earlier` the next time.

    earlier, batch: residuals, oldest first. reward_range: reward_max - reward_min.
    """
    window = Window(earlier, reward_range)
    changed = [window.add(residual) for residual in batch]
    drift = Drift(fmean([*earlier, *batch[: changed.index(True)]]), fmean(batch)) if any(changed) else None
    return drift, window.residuals[-RESIDUALS_KEPT:]
