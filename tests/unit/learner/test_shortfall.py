import pytest

from learner.shortfall import reward_shortfall


@pytest.mark.parametrize(
    ("returns", "low", "high", "shortfall"),
    [
        ([0.0, 1.0, 1.0, 1.0], -1.0, 1.0, 0.25),  # three of four right, rewards 0 and 1 in the default range
        ([1.0, 1.0], -1.0, 1.0, 0.0),
        ([-1.0, 0.5], -1.0, 1.0, 1.0),  # in the lower half
        ([9.0, 7.0], 0.0, 10.0, 0.4),
        ([1.5, 1.5], -1.0, 1.0, 0.0),  # turns may add up to more than the range
    ],
)
def test_what_is_left_to_gain(returns: list[float], low: float, high: float, shortfall: float) -> None:
    assert reward_shortfall(returns, low, high) == pytest.approx(shortfall)
