"""How much a policy still has to gain."""

import statistics
from collections.abc import Sequence


def reward_shortfall(
    returns: Sequence[float], reward_counts: Sequence[int], reward_min: float, reward_max: float
) -> float:
    """min(1, 2 (reward_max - mean reward) / (reward_max - reward_min)), at least 0: 1 in the lower half of the range.

    returns: one per rollout of the batch; reward_counts: how many rewards each is the sum of, so that a rollout with a
    reward per turn counts with the mean of them. The range is the policy's declared one of one reward,
    reward_min < reward_max.
    """
    mean = statistics.fmean(total / count for total, count in zip(returns, reward_counts, strict=True))
    return min(1.0, max(0.0, 2.0 * (reward_max - mean) / (reward_max - reward_min)))
