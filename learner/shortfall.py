"""How much a policy still has to gain."""

import statistics
from collections.abc import Sequence


def reward_shortfall(returns: Sequence[float], reward_min: float, reward_max: float) -> float:
    """min(1, 2 (reward_max - mean return) / (reward_max - reward_min)), at least 0: 1 in the lower half of the range.

    returns: one per rollout of the batch. The range is the policy's declared one, reward_min < reward_max.
    """
    shortfall = 2.0 * (reward_max - statistics.fmean(returns)) / (reward_max - reward_min)
    return min(1.0, max(0.0, shortfall))
