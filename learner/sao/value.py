"""The critic: lambda-return targets, squared-error loss, explained variance (arXiv 2607.07508 section 3)."""

from torch import Tensor, tensor

from learner.sao.advantages import check_trajectory
from learner.sao.objective import check_token_count

MIN_TARGET_VARIANCE = 1e-12
"""Below this the targets tie and explained variance has no meaning."""


def lambda_returns(rewards: Tensor, values: Tensor, gamma: float, lam: float, end: float = 0.0) -> Tensor:
    """The critic's targets for one trajectory, G_t = A_t + V(s_t), as

        G_t = rew_t + gamma * ((1 - lambda) * V(s_next) + lambda * G_next)

    next = the next action token across observations; V_next = G_next = `end` after the last, which is 0 unless the
    rollout was cut off there. With lambda = 1 and gamma = 1 this is the sum of the rewards still to come, free of V.
    Built before any whitening.

    rewards, values, end: as in `gae`; (T,), (T,) and a number. Returns (T,) in the values' dtype, without gradient;
    accumulated in double.
    """
    check_trajectory(rewards, values)
    returns: list[float] = []
    next_value = next_return = end
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        next_return = reward + gamma * ((1.0 - lam) * next_value + lam * next_return)
        next_value = value
        returns.append(next_return)
    return tensor(returns[::-1], dtype=values.dtype, device=values.device)


def value_loss(values: Tensor, targets: Tensor, token_count: int) -> Tensor:
    """(1 / N) sum_t (V(s_t) - G_t)^2, N = action tokens of the WHOLE batch (never of a micro-batch).

    values: (T,) with gradient. targets: (T,), taken as constants. Returns a scalar.
    """
    check_token_count(token_count)
    if values.shape != targets.shape:
        raise ValueError(f"values {tuple(values.shape)} and targets {tuple(targets.shape)} must have one shape")
    return (values - targets.detach()).square().sum() / token_count


def explained_variance(values: Tensor, targets: Tensor) -> float | None:
    """EV = 1 - Var(G - V) / Var(G), population variances over the batch's action tokens.

    values, targets: (N,). None when Var(G) < 1e-12: a batch whose returns tie still teaches the critic, but says
    nothing about what it explains.
    """
    exact = targets.detach().double()
    variance = exact.var(correction=0).item()
    if variance < MIN_TARGET_VARIANCE:
        return None
    return 1.0 - (exact - values.detach().double()).var(correction=0).item() / variance
