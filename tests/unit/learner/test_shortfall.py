import pytest

from learner.shortfall import reward_shortfall


@pytest.mark.parametrize(
    ("returns", "counts", "low", "high", "shortfall"),
    [
        ([0.0, 1.0, 1.0, 1.0], [1] * 4, -1.0, 1.0, 0.25),  # three of four right, rewards 0 and 1 in the default range
        ([1.0, 1.0], [1, 1], -1.0, 1.0, 0.0),
        ([-1.0, 0.5], [1, 1], -1.0, 1.0, 1.0),  # in the lower half
        ([9.0, 7.0], [1, 1], 0.0, 10.0, 0.4),
        ([5.0, 0.0], [5, 5], -1.0, 1.0, 0.5),  # five turns with a reward each: the mean reward is 1 and 0
        ([5.0, 5.0], [5, 5], -1.0, 1.0, 0.0),
        ([5.0, 0.5], [5, 1], -1.0, 1.0, 0.25),
    ],
)
def test_what_is_left_to_gain(
    returns: list[float], counts: list[int], low: float, high: float, shortfall: float
) -> None:
    assert reward_shortfall(returns, counts, low, high) == pytest.approx(shortfall)
