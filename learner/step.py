"""One update: the critic adapts first, then the policy (arXiv 2607.07508).

K full-batch critic steps -> V read again -> advantages -> `policy_steps` full-batch policy steps, each with the ratios
to the behaviour log-probs as the policy stands then, so that DIS rejects what has moved too far. Every loss is a mean
over the action tokens of the whole batch, whatever the micro-batches. Where the advantages take no critic
(`LearningSettings.advantage`), none runs.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import torch
from torch import Tensor
from torch.optim import Optimizer

from app.policies.learning import LearningSettings
from app.rollouts.learning import RolloutSummary
from learner.advantages import first_residuals, policy_advantages
from learner.health import CriticStep, PolicyReading, health_figures
from learner.model import LearnerModel
from learner.optimisers import Optimisers, clip_and_step
from learner.plan import BatchPlan, MicroBatch
from learner.policy_batch import PolicyBatch
from learner.policy_step import PolicyPass, policy_step
from learner.sao.anchor import expected_reward, failing
from learner.sao.clipping import clip_accepted
from learner.sao.value import value_loss
from learner.trajectory import Trajectory, per_trajectory
from learner.values import end_values, read_values, value_targets


@dataclass(frozen=True)
class UpdateResult:
    health: dict[str, object]
    seconds: dict[str, float]
    """Wall seconds per phase."""
    summaries: dict[UUID, RolloutSummary]
    policy_changed: bool
    """False in a critic warm-up, and where nothing is left to gain and the learning rate is 0: there is no new policy
    version then."""


def run_update(
    model: LearnerModel,
    optimisers: Optimisers,
    trajectories: Sequence[Trajectory],
    settings: LearningSettings,
    updates_done: int,
    shortfall: float,
    earlier_returns: Sequence[float] = (),
    reward_range: tuple[float, float] = (-1.0, 1.0),
) -> UpdateResult:
    """Trains critic and policy on one batch, in place. `updates_done` counts the policy's earlier updates, the
    critic's warm-up included, value pretrainings not.

    shortfall: what the policy still has to gain (`reward_shortfall`); learning rate and anchor follow it if so set.
    earlier_returns: of the rollouts trained before this batch, oldest first, for a running mean.
    reward_range: the policy's declared one, for the anchor where the critic expects failure.

    Raises:
        TrainingDiverged: a loss or gradient is not finite.
        ValueError: there are no trajectories.
    """
    warming_up = updates_done < settings.warmup_updates
    seconds: dict[str, float] = {}
    plan = model.plan(trajectories, settings.tokens_per_micro_batch)
    critic: list[CriticStep] = []
    values: Tensor | None = None
    ends = torch.zeros(len(trajectories))
    if settings.advantage == "value":
        with _timed(seconds, "critic"):
            critic = [
                critic_step(model, optimisers.value, plan, trajectories, settings) for _ in range(settings.critic_steps)
            ]
            values = read_values(model, plan)
            ends = end_values(model, trajectories, settings)
    advantages = policy_advantages(trajectories, values, settings, earlier_returns, ends)
    base_states, policy_lr, noise_share = None, None, None
    if settings.anchor_coefficient > 0:
        with _timed(seconds, "anchor"):
            base_states = model.read_states("base", plan)
    with _timed(seconds, "policy"):
        if warming_up:
            policy = [PolicyPass(model, plan, base_states).read()]
        else:
            policy_lr = _set_policy_lr(optimisers.policy, settings, updates_done, shortfall)
            anchor_weights = _anchor_weights(trajectories, values, settings, shortfall, reward_range)
            batch = PolicyBatch(plan, trajectories, advantages, settings, *anchor_weights, optimisers.pushes)
            policy = [
                policy_step(model, optimisers.policy, plan, base_states, batch) for _ in range(settings.policy_steps)
            ]
            if settings.centring > 0:
                noise_share = optimisers.pushes.noise_share().tolist()
            else:
                optimisers.pushes.reset()
    return UpdateResult(
        health={
            **health_figures(trajectories, critic, values, advantages, policy, settings),
            "policy_lr": policy_lr,
            "reward_shortfall": shortfall,
            "noise_share": noise_share,
        },
        seconds=seconds,
        summaries=_summaries(trajectories, critic, advantages, policy, settings),
        policy_changed=policy_lr is not None and policy_lr > 0,
    )


def _anchor_weights(
    trajectories: Sequence[Trajectory],
    values: Tensor | None,
    settings: LearningSettings,
    shortfall: float,
    reward_range: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """(N,) weights of KL(base || pi) in units of the coefficient, and what comes on top where failure is expected."""
    share = (1 + shortfall) / 2 if settings.anchor_follows_shortfall else 1
    to_come = torch.cat([t.rewards_to_come for t in trajectories])
    before = torch.cat([t.rewards_before for t in trajectories])
    weights = torch.full(to_come.shape, float(share))
    if values is None:  # without a critic nothing is expected
        return weights, torch.zeros_like(weights)
    return weights, settings.anchor_where_failing * failing(expected_reward(values, to_come, before), *reward_range)


def critic_step(
    model: LearnerModel,
    optimiser: Optimizer,
    plan: BatchPlan,
    trajectories: Sequence[Trajectory],
    settings: LearningSettings,
) -> CriticStep:
    # with lambda = 1 the targets are sums of rewards, free of V: no need to read it first
    current = read_values(model, plan) if settings.critic_lambda < 1 else torch.zeros(plan.token_count)
    ends = end_values(model, trajectories, settings)
    targets = value_targets(trajectories, current, ends, settings)
    values = torch.empty(plan.token_count)

    def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        predicted = model.values(states)
        values[micro_batch.index] = predicted.detach().cpu()
        return value_loss(predicted, targets[micro_batch.index].to(predicted.device), plan.token_count)

    optimiser.zero_grad()
    model.accumulate_gradients("value", plan, loss)
    grad_norm = clip_and_step(optimiser, model.value_parameters, settings.value_grad_clip, "critic")
    return CriticStep(values, ends, targets, grad_norm)


def _set_policy_lr(optimiser: Optimizer, settings: LearningSettings, updates_done: int, shortfall: float) -> float:
    policy_updates = updates_done - settings.warmup_updates + 1
    share = min(1.0, policy_updates / (settings.lr_warmup_updates + 1))
    if settings.lr_follows_shortfall:
        share *= shortfall
    lr = settings.policy_lr * share
    for group in optimiser.param_groups:
        group["lr"] = lr
    return lr


def _summaries(
    trajectories: Sequence[Trajectory],
    critic: Sequence[CriticStep],
    advantages: Tensor,
    policy: Sequence[PolicyReading],
    settings: LearningSettings,
) -> dict[UUID, RolloutSummary]:
    """critic: its steps, of which the first one's values had seen none of these rewards; empty: no critic ran."""
    residuals = {}
    if critic:
        residuals = first_residuals(trajectories, critic[0].values, critic[0].ends, settings.gamma)
    behaviour = torch.cat([t.behaviour_logprobs for t in trajectories])
    accepted = [
        clip_accepted(reading.logprobs - behaviour, advantages, settings.dis_band, settings.clip) for reading in policy
    ]
    rejected = (~torch.stack(accepted)).float().mean(0)
    of_rollout: dict[UUID, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for trajectory, advantage, share in zip(
        trajectories, per_trajectory(advantages, trajectories), per_trajectory(rejected, trajectories), strict=True
    ):
        of_rollout[trajectory.rollout_id].append((advantage, share))
    summaries = {}
    for rollout_id, segments in of_rollout.items():
        advantage, share = (torch.cat(part).double() for part in zip(*segments, strict=True))
        summaries[rollout_id] = RolloutSummary(
            action_tokens=advantage.numel(),
            advantage_mean=advantage.mean().item(),
            advantage_std=advantage.std(correction=0).item(),
            masked_share=share.mean().item(),
            residual=residuals.get(rollout_id),
        )
    return summaries


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
