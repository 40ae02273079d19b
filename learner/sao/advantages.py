"""Advantages: skip-observation token GAE (arXiv 2607.07508 Eq. 4-5), the policy's lambda, whitening."""

from torch import Tensor, tensor


def policy_lambda(action_tokens: int, alpha: float) -> float:
    """lambda = clamp(1 - 1 / (alpha * l), 0, 1) with l = action tokens of the whole rollout (all its segments)."""
    if action_tokens < 1:
        raise ValueError(f"a trained rollout has at least one action token, got {action_tokens}")
    return min(max(1.0 - 1.0 / (alpha * action_tokens), 0.0), 1.0)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float, end: float = 0.0) -> Tensor:
    """Advantages of one trajectory, observations deleted from the time axis (Eq. 4-5):

        delta_t = rew_t + gamma * V(s_next) - V(s_t)
        A_t     = delta_t + gamma * lambda * A_next

    next = the next ACTION token, across observations; after the last one A_next = 0 and V_next = `end`: 0, since the
    end of a segment is terminal, or the value of what lies beyond where a rollout was cut off.

    rewards: (T,) the reward that arrives with each action token. values: (T,) V(s_t), the value of the state BEFORE
    action token t. One trajectory has one lambda, hence a float: there is no batch axis to broadcast over.
    Returns (T,) in the values' dtype, without gradient; accumulated in double precision.
    """
    check_trajectory(rewards, values)
    advantages: list[float] = []
    next_value, next_advantage = end, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return tensor(advantages[::-1], dtype=values.dtype, device=values.device)


def whiten(advantages: Tensor, floor: float) -> Tensor:
    """A' = (A - mean A) / max(std A, floor), over all N action tokens of the whole batch; population std.

    advantages: (N,). The floor keeps the noise of a critic that explains nearly everything from being blown up to
    unit size. Returns (N,) in the same dtype; the statistics are taken in double precision.
    """
    exact = advantages.detach().double()
    std = exact.std(correction=0).clamp(min=floor)
    return ((exact - exact.mean()) / std).to(advantages.dtype)


def check_trajectory(rewards: Tensor, values: Tensor) -> None:
    """ValueError unless both are (T,) with the same T: anything else would broadcast silently."""
    if rewards.dim() != 1 or rewards.shape != values.shape:
        raise ValueError(
            f"rewards and values must be 1-D over one trajectory's action tokens, "
            f"got {tuple(rewards.shape)} and {tuple(values.shape)}"
        )
