"""Reading the critic: the values of a batch's tokens, what lies beyond a cut, and the targets of both."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.model import LearnerModel
from learner.plan import BatchPlan
from learner.sao.value import lambda_returns
from learner.trajectory import Trajectory, per_trajectory


def read_values(model: LearnerModel, plan: BatchPlan) -> Tensor:
    """(N,) V(s_t), on the CPU."""
    with torch.no_grad():
        return model.values(model.read_states("value", plan)).cpu()


def end_values(model: LearnerModel, trajectories: Sequence[Trajectory], settings: LearningSettings) -> Tensor:
    """(B,) V of the state after a trajectory's last token, where it was cut off and `truncation` says bootstrap; 0
    everywhere else: it ends there."""
    ends = torch.zeros(len(trajectories))
    if settings.truncation == "terminal":
        return ends
    cut = [i for i, trajectory in enumerate(trajectories) if trajectory.truncated]
    if cut:
        longer = [_one_token_on(trajectories[i]) for i in cut]
        ends[cut] = read_values(model, model.plan(longer, settings.tokens_per_micro_batch))
    return ends


def _one_token_on(trajectory: Trajectory) -> Trajectory:
    """The same context with one action token behind it, whose V is that of the state after the last token: V(s_t) is
    read before token t, so it is no matter which one it is."""
    return replace(
        trajectory,
        token_ids=torch.cat([trajectory.token_ids, trajectory.token_ids[-1:]]),
        action_positions=torch.tensor([trajectory.token_ids.numel()]),
        behaviour_logprobs=trajectory.behaviour_logprobs[-1:],
        rewards=trajectory.rewards[-1:],
        reward_counts=trajectory.reward_counts[-1:],
        temperatures=trajectory.temperatures[-1:],
        staleness=trajectory.staleness[-1:],
        interaction_index=trajectory.interaction_index[-1:],
    )


def value_targets(
    trajectories: Sequence[Trajectory], values: Tensor, ends: Tensor, settings: LearningSettings
) -> Tensor:
    """(N,) the critic's lambda-returns. values: (N,), which lambda = 1 does not read. ends: (B,) as `end_values`."""
    parts = zip(trajectories, per_trajectory(values, trajectories), ends.tolist(), strict=True)
    return torch.cat([lambda_returns(t.rewards, v, settings.gamma, settings.critic_lambda, end) for t, v, end in parts])
