"""The figures of one update by which an operator judges it. Finite numbers and nulls only: they are stored as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.sao.health import effective_sample_share, k3, masked_share, mean_abs_log_ratio
from learner.sao.value import explained_variance
from learner.trajectory import Trajectory


@dataclass(frozen=True)
class CriticStep:
    """What one critic step saw: (N,) values before it, (B,) values beyond cuts, (N,) targets, and the gradient's norm
    before clipping."""

    values: Tensor
    ends: Tensor
    targets: Tensor
    grad_norm: float


@dataclass(frozen=True)
class PolicyReading:
    """The policy at one moment, over the batch's N action tokens, in flat order."""

    logprobs: Tensor
    """(N,) log pi of the sampled tokens, nats."""
    entropy: Tensor
    """(N,) of the full-vocabulary distribution, nats."""
    base_kl: Tensor
    """(N,) KL(base || pi), nats; empty where the anchor is off."""
    grad_norm: float | None
    """Of the step taken there, before clipping; None where none was taken."""


def health_figures(
    trajectories: Sequence[Trajectory],
    critic: Sequence[CriticStep],
    values: Tensor | None,
    advantages: Tensor,
    policy: Sequence[PolicyReading],
    settings: LearningSettings,
) -> dict[str, object]:
    """The figures that docs/learning.md explains, but for what only the claim knows.

    critic, values: its steps, and (N,) its values after them; empty and None where no critic ran. advantages: (N,) as
    the policy trained on them. policy: one reading per policy step, taken before it; a single one without a step in a
    critic warm-up. Ratio figures are those of the first reading: later ones contain this update's own movement.
    """
    behaviour = torch.cat([t.behaviour_logprobs for t in trajectories])
    staleness = torch.cat([t.staleness for t in trajectories])
    first = policy[0]
    log_ratio = first.logprobs - behaviour
    fresh = log_ratio[staleness == 0]
    masked = [
        masked_share(reading.logprobs - behaviour, advantages, settings.dis_band, settings.clip) for reading in policy
    ]
    returns = torch.stack([t.rewards.double().sum() for t in trajectories])
    return {
        "trajectories": len(trajectories),
        "action_tokens": behaviour.numel(),
        "context_tokens": sum(t.token_ids.numel() for t in trajectories) - behaviour.numel(),
        "mean_reward": returns.mean().item(),
        "return_variance": returns.var(correction=0).item(),
        **_critic_figures(critic, values),
        "advantage_mean": advantages.double().mean().item(),
        "advantage_std": advantages.double().std(correction=0).item(),
        "policy_grad_norms": [reading.grad_norm for reading in policy if reading.grad_norm is not None],
        "masked_low": [low for low, _ in masked],
        "masked_high": [high for _, high in masked],
        "mean_abs_log_ratio": mean_abs_log_ratio(log_ratio),
        "k3": k3(log_ratio),
        "mean_abs_log_ratio_fresh": mean_abs_log_ratio(fresh) if fresh.numel() else None,
        "k3_fresh": k3(fresh) if fresh.numel() else None,
        "effective_sample_share": effective_sample_share(log_ratio),
        "entropy": first.entropy.double().mean().item(),
        "base_kl": first.base_kl.double().mean().item() if first.base_kl.numel() else None,
        "staleness": {str(s): n for s, n in sorted(Counter(staleness.tolist()).items())},
    }


def _critic_figures(critic: Sequence[CriticStep], values: Tensor | None) -> dict[str, object]:
    """Nulls where no critic ran."""
    grad_norms = [step.grad_norm for step in critic]
    if values is None:
        return dict.fromkeys(("ev_before", "ev_after", "value_loss", "value_mean")) | {"value_grad_norms": grad_norms}
    targets = critic[-1].targets
    return {
        "ev_before": explained_variance(critic[0].values, critic[0].targets),
        "ev_after": explained_variance(values, targets),
        "value_loss": (values - targets).double().square().mean().item(),
        "value_mean": values.double().mean().item(),
        "value_grad_norms": grad_norms,
    }
