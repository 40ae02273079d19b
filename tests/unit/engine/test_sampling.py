import math

import numpy as np
import pytest
import torch

from app.engine.embedded.sampling import sample
from app.engine.embedded.sequence import SampledToken, SamplingParams

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def draw(params: SamplingParams, logits: torch.Tensor = LOGITS, seed: int = 0) -> SampledToken:
    (token,) = sample(logits, [params], [np.random.Generator(np.random.SFC64(seed))])
    assert token is not None
    return token


def test_logprobs_are_those_of_the_temperature() -> None:
    """By hand at T = 0.5: squares 0.25, 0.09, 0.0225, 0.0025, sum 0.365."""
    expected = [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]
    token = draw(SamplingParams(1, temperature=0.5, top_logprobs=4))
    assert token.top == pytest.approx({i: math.log(p) for i, p in enumerate(expected)}, abs=1e-6)
    assert list(token.top) == [0, 1, 2, 3]
    assert token.logprob == token.top[token.id]


def test_greedy_reports_temperature_one() -> None:
    token = draw(SamplingParams(1, temperature=0.0))
    assert (token.id, token.logprob) == (0, pytest.approx(math.log(0.5)))
    assert token.top == {}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(1, top_k=2, top_logprobs=4), 2),
        (SamplingParams(1, top_k=9, top_logprobs=4), 4),
        (SamplingParams(1, top_p=0.79, top_logprobs=4), 2),
        (SamplingParams(1, top_p=0.81, top_logprobs=4), 3),
        (SamplingParams(1, top_p=0.01, top_logprobs=4), 1),
        (SamplingParams(1, top_k=3, top_p=0.6, top_logprobs=4), 2),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(params: SamplingParams, kept: int) -> None:
    top = draw(params).top
    finite = {i for i, logprob in top.items() if math.isfinite(logprob)}
    assert finite == set(range(kept))
    assert sum(math.exp(logprob) for logprob in top.values()) == pytest.approx(1.0)
    assert all(draw(params, seed=seed).id < kept for seed in range(50))


def test_frequencies_are_the_probabilities() -> None:
    """2,000 draws: each count within four standard deviations."""
    logits = LOGITS.expand(2000, -1)
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in range(2000)]
    tokens = sample(logits, [SamplingParams(1)] * 2000, generators)
    counts = np.bincount([token.id for token in tokens if token is not None], minlength=4)
    for count, p in zip(counts, [0.5, 0.3, 0.15, 0.05], strict=True):
        assert abs(count - 2000 * p) < 4 * (2000 * p * (1 - p)) ** 0.5


def test_a_row_draws_the_same_whatever_its_neighbours() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in range(5)]
    params = [SamplingParams(1), SamplingParams(1, temperature=0.0), *[SamplingParams(1, top_k=5)] * 3]
    together = sample(logits, params, generators)
    for row in range(5):
        alone = draw(params[row], logits[row : row + 1], seed=row)
        neighbour = together[row]
        assert neighbour is not None
        assert neighbour.id == alone.id


def test_a_row_without_finite_numbers_is_none_and_harms_nobody() -> None:
    logits = torch.cat([torch.full((1, 4), float("nan")), LOGITS])
    generators = [np.random.Generator(np.random.SFC64(seed)) for seed in range(2)]
    broken, good = sample(logits, [SamplingParams(1)] * 2, generators)
    assert broken is None
    assert good is not None


def test_of_a_large_vocabulary_only_likely_tokens_are_drawn() -> None:
    """1e8 draws of noise; by hand, 49,151 tokens of e^-30 leave 5e-9 of a chance per token to draw one of them."""
    logits = torch.zeros(1, 49152)
    logits[0, 7] = 30.0
    generator = np.random.Generator(np.random.SFC64(0))
    for params in (SamplingParams(1), SamplingParams(1, top_k=50), SamplingParams(1, top_p=0.9)):
        drawn = [sample(logits, [params], [generator])[0] for _ in range(700)]
        assert {token.id for token in drawn if token is not None} == {7}
        assert None not in drawn


class ZeroDraw(np.random.Generator):
    """Draws ones, and exactly 0 for the given token, which a real generator may do too."""

    def __init__(self, token: int):
        super().__init__(np.random.SFC64(0))
        self.token = token

    def standard_exponential(self, size: int) -> np.ndarray:  # type: ignore[override]
        noise = np.ones(size)
        noise[self.token] = 0.0
        return noise


@pytest.mark.parametrize("unlikely", [-30.0, -200.0, -math.inf])
def test_a_draw_of_zero_makes_no_unlikely_token_win(unlikely: float) -> None:
    (token,) = sample(torch.tensor([[0.0, unlikely]]), [SamplingParams(1)], [ZeroDraw(1)])
    assert token is not None
    assert token.id == 0


def test_a_draw_of_zero_lets_a_likely_token_win() -> None:
    (token,) = sample(LOGITS, [SamplingParams(1)], [ZeroDraw(2)])
    assert token is not None
    assert token.id == 2
