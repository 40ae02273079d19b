"""The policy's advantages of one batch, by the setting `advantage`: SAO's, or a comparator's."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from uuid import UUID

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.sao.advantages import gae, policy_lambda, whiten
from learner.sao.baselines import group_advantages, running_mean_baselines
from learner.sao.value import lambda_returns
from learner.trajectory import Trajectory, per_trajectory


def policy_advantages(
    trajectories: Sequence[Trajectory],
    values: Tensor | None,
    settings: LearningSettings,
    earlier_returns: Sequence[float],
    ends: Tensor | None = None,
) -> Tensor:
    """(N,) float32 over the batch's action tokens in flat order; whitened over the batch if so set.

    values: (N,) V(s_t), which `value` alone needs. earlier_returns: of the rollouts trained before, oldest first, which
    `running_mean` alone reads. ends: (B,) V beyond where a rollout was cut off, for `value`; None: none was.
    """
    if settings.advantage == "value":
        assert values is not None
        ends = torch.zeros(len(trajectories)) if ends is None else ends
        advantages = _value(trajectories, values, ends, settings)
    elif settings.advantage == "running_mean":
        advantages = _running_mean(trajectories, earlier_returns, settings.gamma)
    else:
        advantages = _group(trajectories)
    return whiten(advantages, settings.whiten_floor) if settings.whiten_advantages else advantages


def _value(trajectories: Sequence[Trajectory], values: Tensor, ends: Tensor, settings: LearningSettings) -> Tensor:
    """GAE per trajectory, lambda by the length of its rollout."""
    return torch.cat(
        [
            gae(t.rewards, v, settings.gamma, policy_lambda(t.rollout_action_tokens, settings.alpha), end)
            for t, v, end in zip(trajectories, per_trajectory(values, trajectories), ends.tolist(), strict=True)
        ]
    )


def _running_mean(trajectories: Sequence[Trajectory], earlier_returns: Sequence[float], gamma: float) -> Tensor:
    """A token's return to go minus its rollout's baseline: a later turn is not credited with the rewards before it."""
    returns = _rollout_returns(trajectories)
    baselines = running_mean_baselines(torch.tensor(list(returns.values())), earlier_returns)
    baseline_of = dict(zip(returns, baselines, strict=True))
    return torch.cat(
        [
            lambda_returns(t.rewards, torch.zeros_like(t.rewards), gamma, lam=1.0) - baseline_of[t.rollout_id]
            for t in trajectories
        ]
    )


def _group(trajectories: Sequence[Trajectory]) -> Tensor:
    """GRPO's, from the rollout's whole return: one number for all of its tokens. One of no group is its own group."""
    returns = _rollout_returns(trajectories)
    group_of = {t.rollout_id: t.group or str(t.rollout_id) for t in trajectories}
    numbers = {group: number for number, group in enumerate(dict.fromkeys(group_of.values()))}
    advantages = group_advantages(torch.tensor(list(returns.values())), [numbers[group_of[r]] for r in returns])
    advantage_of = dict(zip(returns, advantages, strict=True))
    return torch.cat([advantage_of[t.rollout_id].expand(t.action_positions.numel()) for t in trajectories])


def _rollout_returns(trajectories: Sequence[Trajectory]) -> dict[UUID, float]:
    """rollout id -> its return, once however many segments it has, in the batch's order."""
    return {t.rollout_id: t.rollout_return for t in trajectories}


def first_residuals(
    trajectories: Sequence[Trajectory], values: Tensor, ends: Tensor, gamma: float
) -> dict[UUID, float]:
    """Per rollout the return that came minus V, at the first action token of each of its segments, divided by the
    number of rewards that it is the sum of; mean over the segments.

    values: (N,) V(s_t), and ends: (B,) V beyond a cut, from before the critic has seen these returns.
    """
    of_rollout: dict[UUID, list[float]] = defaultdict(list)
    for t, v, end in zip(trajectories, per_trajectory(values, trajectories), ends.tolist(), strict=True):
        arrived = lambda_returns(t.rewards, torch.zeros_like(t.rewards), gamma, 1.0, end)[0]
        of_rollout[t.rollout_id].append((arrived - v[0]).item() / max(1, int(t.rewards_to_come[0])))
    return {rollout_id: fmean(residuals) for rollout_id, residuals in of_rollout.items()}
