"""Value pretraining: the critic learns from logged history before (or while) the policy moves.

Behaviour policies of any age will do: the critic's target is what was earned, whoever earned it.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from app.rollouts.claimed import Claim, ClaimedRollout
from learner.batch import build_trajectories
from learner.sao.value import explained_variance
from learner.state import LearnerState
from learner.step import UpdateResult, critic_step
from learner.trajectory import Trajectory
from learner.update import Trained
from learner.values import end_values, read_values, value_targets


def pretrain_value(claim: Claim, state: LearnerState, epochs: int) -> Trained:
    """Trains the critic of `state`, in place, on all of the claim's rollouts `epochs` times; the policy stays.

    One critic step per `rollouts_per_update` rollouts, in an order drawn from the policy's seed and the update's
    number. Explained variance is that of the history itself, before and after. A rollout that cannot be trained is left
    out: there is no smaller group in which the others would be tried again.

    Raises:
        ValueError: no rollout can be trained, or a health figure is not finite.
        TrainingDiverged: a loss or gradient is not finite.
    """
    started = time.perf_counter()
    settings = state.settings
    rollouts, left_out = _trainable(claim.rollouts)
    generator = torch.Generator().manual_seed((settings.seed + claim.updates_done) % 2**63)
    ev_before, _ = _fit(state, rollouts)
    grad_norms = []
    for _ in range(epochs):
        order = torch.randperm(len(rollouts), generator=generator).tolist()
        for batch in _batches([rollouts[i] for i in order], settings.rollouts_per_update):
            plan = state.model.plan(batch, settings.tokens_per_micro_batch)
            grad_norms.append(critic_step(state.model, state.optimisers.value, plan, batch, settings).grad_norm)
    ev_after, loss = _fit(state, rollouts)
    trajectories = [trajectory for rollout in rollouts for trajectory in rollout]
    health: dict[str, object] = {
        "kind": "value_pretraining",
        "rollouts": len(rollouts),
        "trajectories": len(trajectories),
        "action_tokens": sum(t.action_positions.numel() for t in trajectories),
        "epochs": epochs,
        "steps": len(grad_norms),
        "ev_before": ev_before,
        "ev_after": ev_after,
        "value_loss": loss,
        "value_grad_norm_max": max(grad_norms),
        "left_out": len(left_out),
        "left_out_first": left_out[0] if left_out else None,
    }
    json.dumps(health, allow_nan=False)
    seconds = {"critic": time.perf_counter() - started}
    return Trained(UpdateResult(health, seconds, {}, policy_changed=False), None, None, None)


def in_words(policy: str, health: Mapping[str, object]) -> str:
    """What a pretraining's health figures say to an operator."""
    words = (
        f"The critic of {policy} was trained on {health['rollouts']} rollouts ({health['action_tokens']} action "
        f"tokens) in {health['steps']} steps: explained variance {_figure(health['ev_before'])} before, "
        f"{_figure(health['ev_after'])} after."
    )
    if health["left_out"]:
        words += f" Left out: {health['left_out']}, the first since {health['left_out_first']}."
    return words


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "undefined (all returns tie)"


def _trainable(rollouts: Sequence[ClaimedRollout]) -> tuple[list[list[Trajectory]], list[str]]:
    """Each rollout's trajectories, and why the others have none.

    Raises:
        ValueError: none has any.
    """
    found, refused = [], []
    for rollout in rollouts:
        try:
            found.append(build_trajectories([rollout]))
        except ValueError as error:
            refused.append(str(error))
    if not found:
        raise ValueError(f"none of {len(refused)} rollouts can be trained; the first: {refused[0]}")
    return found, refused


def _fit(state: LearnerState, rollouts: Sequence[list[Trajectory]]) -> tuple[float | None, float]:
    """Explained variance and mean squared error of the critic as it stands."""
    settings = state.settings
    values, targets = [], []
    for batch in _batches(rollouts, settings.rollouts_per_update):
        read = read_values(state.model, state.model.plan(batch, settings.tokens_per_micro_batch))
        values.append(read)
        targets.append(value_targets(batch, read, end_values(state.model, batch, settings), settings))
    predicted, target = torch.cat(values), torch.cat(targets)
    return explained_variance(predicted, target), (predicted - target).double().square().mean().item()


def _batches(rollouts: Sequence[list[Trajectory]], size: int) -> Iterator[list[Trajectory]]:
    """As equal as they can be, none above `size` rollouts."""
    count = math.ceil(len(rollouts) / size)
    for i in range(count):
        part = rollouts[len(rollouts) * i // count : len(rollouts) * (i + 1) // count]
        yield [trajectory for rollout in part for trajectory in rollout]
