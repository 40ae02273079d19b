"""What becomes of a token whose ratio has moved too far: DIS, and two comparators that others train with.

With `r_t = pi(a_t) / pi_b(a_t)` each of them maximises `E_t[ sg(w_t) A_t log pi(a_t | s_t) ]`, and they differ in w_t:

    dis     r inside the open band, 0 outside (objective.py; arXiv 2607.07508 Eq. 2-3)
    ppo     0 where A > 0 and r > high, or A < 0 and r < low, else r: the gradient of PPO's clipped surrogate,
            min(r A, clip(r, low, high) A) (arXiv 1707.06347 Eq. 7)
    none    r: plain importance sampling, the gradient of r A (arXiv 1707.06347 Eq. 6)

PPO's bounds are the band itself, (1 - eps, 1 + eps) in its paper. Its pi_old is here, as everywhere in this learner,
the behaviour policy as the engine recorded it. So ppo still trains a token that is far outside on the side that the
advantage pulls back from, where dis masks both sides.
"""

from typing import Literal

import torch
from torch import Tensor, where, zeros_like

from learner.sao.objective import dis_accepted, dis_weights, log_band, policy_loss, weighted_loss

Clip = Literal["dis", "ppo", "none"]


def clip_sides(log_ratio: Tensor, advantages: Tensor, band: tuple[float, float], clip: Clip) -> tuple[Tensor, Tensor]:
    """Which tokens train nothing because their ratio is too low, and because it is too high: two (T,) of bool.

    log_ratio: (T,) log pi - log pi_b, nats. advantages: (T,). Edges count as outside for dis and as inside for ppo,
    whose surrogate has its kink there.
    """
    low, high = log_band(band)
    if clip == "dis":
        return log_ratio <= low, log_ratio >= high
    if clip == "ppo":
        return (log_ratio < low) & (advantages < 0), (log_ratio > high) & (advantages > 0)
    nowhere = zeros_like(log_ratio, dtype=torch.bool)
    return nowhere, nowhere


def clip_accepted(log_ratio: Tensor, advantages: Tensor, band: tuple[float, float], clip: Clip) -> Tensor:
    """Which tokens train: (T,) bool. Arguments as in `clip_sides`."""
    if clip == "dis":
        return dis_accepted(log_ratio, band)
    low, high = clip_sides(log_ratio, advantages, band, clip)
    return ~(low | high)


def clip_weights(log_ratio: Tensor, advantages: Tensor, band: tuple[float, float], clip: Clip) -> Tensor:
    """w_t, detached: (T,) of the log-ratio's dtype. Only accepted log-ratios are exponentiated (inf * 0 is NaN).

    Without a bound on its side a ratio may be infinite; the gradient is then not finite, which the learner refuses.
    """
    if clip == "dis":
        return dis_weights(log_ratio, band)
    log_ratio = log_ratio.detach()
    accepted = clip_accepted(log_ratio, advantages, band, clip)
    zero = zeros_like(log_ratio)
    return where(accepted, where(accepted, log_ratio, zero).exp(), zero)


def clipped_policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    band: tuple[float, float],
    token_count: int,
    clip: Clip,
) -> Tensor:
    """-(1 / N) sum_t sg(w_t) A_t log pi(a_t | s_t), to be minimised; with `dis` it is `objective.policy_loss`.

    logprobs: (T,) log pi of the sampled tokens, nats, with gradient. behaviour_logprobs, advantages: (T,), constants.
    token_count: N of the WHOLE batch. Returns a scalar; its gradient, not its value, is that of the surrogates above.
    """
    if clip == "dis":
        return policy_loss(logprobs, behaviour_logprobs, advantages, band, token_count)
    weights = clip_weights(logprobs.detach() - behaviour_logprobs, advantages, band, clip)
    return weighted_loss(logprobs, weights, advantages, token_count)
