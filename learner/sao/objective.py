"""The policy's objective with direct double-sided importance sampling (DIS), arXiv 2607.07508 Eq. 1-3."""

import math

from torch import Tensor, where, zeros_like


def log_band(band: tuple[float, float]) -> tuple[float, float]:
    """The open interval of accepted ratios (low, high) as an open interval of log-ratios, in nats.

    low may be 0 and high may be infinite (no guard on that side). ValueError if the interval is empty or negative.
    """
    low, high = band
    if not 0.0 <= low < high:
        raise ValueError(f"the DIS band must satisfy 0 <= low < high, got ({low}, {high})")
    return (math.log(low) if low > 0.0 else -math.inf, math.log(high))


def dis_accepted(log_ratio: Tensor, band: tuple[float, float]) -> Tensor:
    """Which tokens DIS keeps: (T,) bool, True where low < r < high, strictly on both sides.

    log_ratio: (T,) log pi - log pi_b, nats. The comparison is made on log-ratios, so nothing overflows; a ratio
    exactly on an edge and a NaN are rejected. The sign of the advantage plays no part.
    """
    low, high = log_band(band)
    return (log_ratio > low) & (log_ratio < high)


def dis_weights(log_ratio: Tensor, band: tuple[float, float]) -> Tensor:
    """f(r_t) of Eq. 2-3: r_t inside the band, 0 outside (masked, not clamped). Detached.

    log_ratio: (T,) log pi - log pi_b, nats. Returns (T,) of the same dtype. Only accepted log-ratios are
    exponentiated: the others would give inf, and inf * 0 is NaN.
    """
    log_ratio = log_ratio.detach()
    accepted = dis_accepted(log_ratio, band)
    zero = zeros_like(log_ratio)
    return where(accepted, where(accepted, log_ratio, zero).exp(), zero)


def policy_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, band: tuple[float, float], token_count: int
) -> Tensor:
    """-J of Eq. 1: -(1 / N) sum_t sg(f(r_t)) A_t log pi(a_t | s_t), to be minimised.

    logprobs: (T,) log pi of the sampled tokens, nats, with gradient. behaviour_logprobs: (T,) as logged by the engine
    at the same temperature. advantages: (T,), taken as constants. token_count: N, the action tokens of the WHOLE
    batch, rejected ones included, so that the sum over micro-batches is the loss of the batch. Returns a scalar.

    The weight is a constant (stop-gradient): the gradient is -f(r) A grad log pi / N, the same as that of
    -1[in band] r A / N. A rejected token contributes exactly 0 to loss and gradient, whatever its log-prob.
    """
    return weighted_loss(logprobs, dis_weights(logprobs.detach() - behaviour_logprobs, band), advantages, token_count)


def weighted_loss(logprobs: Tensor, weights: Tensor, advantages: Tensor, token_count: int) -> Tensor:
    """-(1 / N) sum_t w_t A_t log pi(a_t | s_t) for constant weights (T,); the other arguments as in `policy_loss`."""
    check_token_count(token_count)
    # a token without weight may have log pi = -inf, and 0 * -inf is NaN: replace it before the product
    kept = where(weights != 0, logprobs, zeros_like(logprobs))
    return -(weights * advantages.detach() * kept).sum() / token_count


def check_token_count(token_count: int) -> None:
    """ValueError unless N can be a whole batch's count of action tokens."""
    if token_count < 1:
        raise ValueError(f"token_count must be the action tokens of the whole batch, at least 1, got {token_count}")
