"""Which sampling is trained: an allow-list."""

import pytest

from app.inference.trainability import untrainable
from app.rollouts.states import SkipReason

OFF = SkipReason.OFF_DISTRIBUTION_SAMPLING


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "opted_out", "reason", "words"),
    [
        (1.0, 1.0, 0, False, None, ""),
        (0.2, 1.0, 0, False, None, ""),
        (2.0, 1.0, 0, False, None, ""),
        (0.7, 1.0, 0, False, None, ""),
        (0.19, 1.0, 0, False, OFF, "temperature 0.19 is below 0.2"),
        (0.0, 1.0, 0, False, OFF, "temperature 0 is below 0.2"),
        (1.0, 0.99, 0, False, OFF, "top_p 0.99"),
        (1.0, 1.0, 50, False, OFF, "top_k 50"),
        (1.0, 1.0, 1, False, OFF, "top_k 1"),
        (1.0, 1.0, 0, True, SkipReason.OPTED_OUT, "metadata.train"),
        (0.0, 0.5, 9, True, SkipReason.OPTED_OUT, "metadata.train"),
    ],
)
def test_table(temperature: float, top_p: float, top_k: int, opted_out: bool, reason: SkipReason | None, words: str):
    found = untrainable(temperature=temperature, top_p=top_p, top_k=top_k, opted_out=opted_out)
    assert (found.reason if found else None) == reason
    if found:
        assert words in found.detail
