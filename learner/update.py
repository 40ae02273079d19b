"""One update in memory: from a claim's rollouts to what is to be committed. Nothing here writes anything."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from app.policies.learning import FORM
from app.rollouts.claimed import Claim, VersionRef
from app.rollouts.learning import NewVersion, UpdateDone
from learner.batch import build_trajectories
from learner.drift import Drift, find_drift
from learner.probes import choose_probes
from learner.shortfall import reward_shortfall
from learner.state import LearnerState
from learner.step import UpdateResult, run_update
from learner.trajectory import Trajectory

TOP = 20
"""Likeliest tokens kept per probe position: what engines answer at most."""
LIBRARIES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Trained:
    result: UpdateResult
    probe: list[Any] | None
    """Per probe position the policy's likeliest tokens at T = 1, [token, log-prob] each; None if it did not change."""
    new_probes: list[list[int]] | None
    """Set where this batch fixes the policy's probe positions ..."""
    probe_zero: list[Any] | None
    """... with version 0's likeliest tokens there."""
    drift: Drift | None = None
    """A change of the environment that shows in this batch."""


def train(claim: Claim, state: LearnerState) -> Trained:
    """Runs the claim's update on `state`, in place; after an error the state is worth nothing.

    Raises:
        ValueError: a rollout cannot be trained, or a health figure is not finite.
        RuntimeError and others: whatever torch raises on the rollouts' data.
    """
    trajectories = build_trajectories(claim.rollouts)
    new_probes = choose_probes(trajectories) if claim.probes is None else None
    prompts = new_probes or [list(probe) for probe in claim.probes or ()]
    # no update has been committed yet, so the policy still is version 0
    probe_zero = state.model.top_logprobs("policy", prompts, TOP) if new_probes else None
    result = _step(claim, state, trajectories)
    json.dumps(result.health, allow_nan=False)  # a figure that is no number is no sound update
    probe = state.model.top_logprobs("policy", prompts, TOP) if result.policy_changed else None
    return Trained(result, probe, new_probes, probe_zero, _watch(claim, state, result))


def step(claim: Claim, state: LearnerState) -> UpdateResult:
    """The claim's learner step alone, as `train` takes it; in place, with its errors."""
    return _step(claim, state, build_trajectories(claim.rollouts))


def _step(claim: Claim, state: LearnerState, trajectories: Sequence[Trajectory]) -> UpdateResult:
    returns = [r.total_return for r in claim.rollouts]
    result = run_update(
        state.model,
        state.optimisers,
        trajectories,
        state.settings,
        claim.updates_done - claim.pretrainings,
        reward_shortfall(returns, [r.reward_count for r in claim.rollouts], claim.reward_min, claim.reward_max),
        tuple(state.recent_returns),
        (claim.reward_min, claim.reward_max),
    )
    state.recent_returns.extend(reversed(returns))  # a claim begins with the newest
    return result


def _watch(claim: Claim, state: LearnerState, result: UpdateResult) -> Drift | None:
    """Looks for a drift in the batch's residuals (there are none without a critic), which the state then holds."""
    residuals = _residuals(claim, result)[::-1]  # a claim begins with the newest
    drift, state.recent_residuals[:] = find_drift(
        state.recent_residuals, residuals, claim.reward_max - claim.reward_min
    )
    return drift


def _residuals(claim: Claim, result: UpdateResult) -> list[float]:
    """`first_residuals`, in the claim's order; empty without a critic."""
    of_rollouts = (
        result.summaries[rollout.id].residual for rollout in claim.rollouts if rollout.id in result.summaries
    )
    return [residual for residual in of_rollouts if residual is not None]


def update_done(
    claim: Claim, state: LearnerState, trained: Trained, new: VersionRef | None, seconds: dict[str, float]
) -> UpdateDone:
    """What to commit. new: the files of the version it makes; None: only the critic learned."""
    returns = [rollout.total_return for rollout in claim.rollouts]
    residuals = _residuals(claim, trained.result)
    return UpdateDone(
        version=NewVersion(new.adapter_name, new.path, new.sha256, trained.probe) if new else None,
        # per rollout: a rollout of several segments is one return, not several
        health={
            **trained.result.health,
            "mean_reward": statistics.fmean(returns),
            "return_variance": statistics.pvariance(returns),
            "residual_mean": statistics.fmean(residuals) if residuals else None,
        },
        seconds=seconds,
        provenance={
            "rollouts": [str(rollout.id) for rollout in claim.rollouts],
            "returns": returns,
            "rewards": {target: reward for rollout in claim.rollouts for target, reward in rollout.rewards.items()},
            "form": FORM,
            "seed": state.settings.seed,
            "pretrainings": claim.pretrainings,
            "checkpoint": str(claim.checkpoint_update_id) if claim.checkpoint_update_id else None,
            "libraries": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
            "device": str(state.model.device),
            "dtype": str(state.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "base_sha256": state.base_sha256,
            "reward_range": [claim.reward_min, claim.reward_max],
        },
        summaries=trained.result.summaries,
        probes=trained.new_probes,
        probe_zero=trained.probe_zero,
    )
