"""Figures that tell whether an update is sound. All over the N action tokens of the whole batch, in double precision.

log_ratio: (N,) log pi - log pi_b, nats; over the tokens of staleness 0, k3 and mean |log r| measure the engine against
the learner alone.
"""

from torch import Tensor
from torch.special import entr

from learner.sao.clipping import Clip, clip_sides


def k3(log_ratio: Tensor) -> float:
    """mean(r - 1 - log r): an unbiased, non-negative estimate of KL(pi_b || pi) from tokens sampled by pi_b, nats."""
    exact = log_ratio.detach().double()
    return (exact.expm1() - exact).mean().item()


def mean_abs_log_ratio(log_ratio: Tensor) -> float:
    """mean |log r|, nats."""
    return log_ratio.detach().double().abs().mean().item()


def effective_sample_share(log_ratio: Tensor) -> float:
    """ESS = (sum r)^2 / (N sum r^2), in (0, 1]; 1 when all ratios are equal.

    The largest log-ratio is subtracted first: ESS does not depend on the ratios' scale, and nothing overflows.
    """
    exact = log_ratio.detach().double()
    ratio = (exact - exact.max()).exp()
    return (ratio.sum().square() / (ratio.numel() * ratio.square().sum())).item()


def masked_share(log_ratio: Tensor, advantages: Tensor, band: tuple[float, float], clip: Clip) -> tuple[float, float]:
    """Shares of tokens that the clip keeps from training, each in [0, 1]: (ratio too low, ratio too high).

    Under dis (r <= low, r >= high), edges included; under ppo only those whose advantage pushes them further out
    (`clip_sides`); under none (0, 0). advantages: (N,).
    """
    low, high = clip_sides(log_ratio.detach(), advantages, band, clip)
    return (low.double().mean().item(), high.double().mean().item())


def entropy(logprobs: Tensor) -> Tensor:
    """-sum_v pi(v) log pi(v) of the full-vocabulary distribution at the sampling temperature, nats.

    logprobs: (T, V). Returns (T,) without gradient.
    """
    return entr(logprobs.detach().exp()).sum(-1)
