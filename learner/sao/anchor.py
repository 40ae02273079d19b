"""The exploration floor: forward KL to the frozen base model (not in the paper; docs/decisions says why).

KL(base || pi) has the logit gradient pi - base: bounded, and alive even where the policy has become deterministic and
its advantage has become 0. Policy-gradient terms and the reverse KL vanish there.
"""

from typing import Any

import torch
from torch import Tensor


class _ForwardKl(torch.autograd.Function):
    """Keeps nothing but its inputs for the backward pass: autograd's own chain would keep a third (T, V) tensor."""

    @staticmethod
    def forward(ctx: Any, base_logprobs: Tensor, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(base_logprobs)
        base = base_logprobs.exp()
        # where base(v) is 0 the term is 0, though log base(v) may be -inf
        return torch.where(base > 0, base * (base_logprobs - logprobs), 0.0).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        (base_logprobs,) = ctx.saved_tensors
        return None, base_logprobs.exp().mul_(-grad_outputs[0].unsqueeze(-1))


def forward_kl(base_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(base || pi) = sum_v base(v) (log base(v) - log pi(v)) per action token, nats.

    base_logprobs: (T, V) log-probs of the frozen base (adapter off), a constant. logprobs: (T, V) of the policy, with
    gradient; both from one temperature. Returns (T,); add c * sum / N with N = action tokens of the whole batch.
    The gradient in logprobs is -base(v); behind a log-softmax over logits / tau that is (pi - base) / tau.
    """
    if base_logprobs.shape != logprobs.shape:
        raise ValueError(f"base {tuple(base_logprobs.shape)} and policy {tuple(logprobs.shape)} must have one shape")
    result: Tensor = _ForwardKl.apply(base_logprobs.detach(), logprobs)
    return result


@torch.no_grad()
def settled(logprobs: Tensor) -> Tensor:
    """(T,) (sum_v pi(v)^2)^2, the square of the chance that two samples are one token: 1 where the policy always takes
    the same, 1/k^2 where it takes k alike. logprobs: (T, V), of the policy."""
    return logprobs.exp().square().sum(-1).square()


def expected_reward(values: Tensor, to_come: Tensor, before: Tensor) -> Tensor:
    """(T,) V / n, the mean of the rewards that the critic expects; infinite where none is to come.

    n is how many rewards were to come, or usually are at that point of a rollout (the batch's mean over tokens with as
    many rewards before them), whichever makes the mean higher: the critic may or may not have known how long the
    rollout would be, and a good policy must not look like a failing one for that. With one reward per rollout it is V.

    values: (T,) V(s_t), the return to go that the critic expects. to_come, before: (T,) rewards that arrive with the
    token or later, and before it.
    """
    totals = torch.zeros(int(before.max()) + 1).index_add_(0, before, to_come.float())
    usual = (totals / before.bincount())[before]
    return torch.where(to_come > 0, torch.maximum(values / to_come, values / usual), float("inf"))


def failing(expected: Tensor, reward_min: float, reward_max: float) -> Tensor:
    """(T,) in [0, 1]: min(1, 2 (reward_max - R) / (reward_max - reward_min)) squared; 1 where the critic expects the
    lower half of the range, 0 where it expects the best.

    expected: (T,) R, see `expected_reward`.
    """
    return (2.0 * (reward_max - expected) / (reward_max - reward_min)).clamp(0.0, 1.0).square()
