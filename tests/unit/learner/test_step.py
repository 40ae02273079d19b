"""One update: what trains when."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from torch import Tensor

from app.policies.dtype import Dtype
from learner.full_model import FullModel
from learner.lora_model import LoraModel
from learner.optimisers import TrainingDiverged, build_optimisers
from learner.prepare import write_version_zero
from learner.step import run_update
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS
from tests.unit.learner.updates import changed, settings, snapshot, update


def test_a_warm_up_trains_the_critic_alone(model: LoraModel) -> None:
    policy, value = snapshot(model.policy_parameters), snapshot(model.value_parameters)
    result = update(model, two_prefix_batch(), SETTINGS, done=SETTINGS.critic_warmup_updates - 1)
    assert not result.policy_changed
    assert result.health["policy_grad_norms"] == []
    assert changed(model.policy_parameters, policy) == set()
    assert changed(model.value_parameters, value) == value.keys()
    assert update(model, two_prefix_batch(), SETTINGS, done=SETTINGS.critic_warmup_updates).policy_changed


def test_nothing_left_to_gain_makes_no_version(model: LoraModel) -> None:
    before = {name: weight.detach().clone() for name, weight in model.policy_parameters.items()}
    chosen = SETTINGS.model_copy(update={"lr_follows_shortfall": True})
    result = update(model, two_prefix_batch(), chosen, shortfall=0.0)
    assert not result.policy_changed
    assert result.health["policy_lr"] == 0.0
    assert all(torch.equal(before[name], weight) for name, weight in model.policy_parameters.items())
    assert update(model, two_prefix_batch(), chosen, shortfall=0.01).policy_changed


def test_an_update_changes_adapters_and_head_and_nothing_else(model: LoraModel) -> None:
    everything = dict(model.peft.named_parameters()) | {
        f"value_head.{n}": p for n, p in model.value_head.named_parameters()
    }
    before = snapshot(everything)
    update(model, two_prefix_batch(), SETTINGS)
    assert changed(everything, before) == model.policy_parameters.keys() | model.value_parameters.keys()


def test_the_critic_learns(fresh_model: LoraModel) -> None:
    chosen = settings(critic_steps=40, value_lr=3e-3)
    health = update(fresh_model, two_prefix_batch(), chosen, done=0).health
    assert health["ev_before"] == pytest.approx(0.0, abs=1e-6)  # V = 0 everywhere
    assert health["ev_after"] > 0.9  # type: ignore[operator]
    assert len(health["value_grad_norms"]) == 40  # type: ignore[arg-type]


def test_tied_rewards_have_no_ev_and_still_teach(model: LoraModel) -> None:
    batch = [replace(t, rewards=torch.zeros_like(t.rewards)) for t in two_prefix_batch()]
    before = snapshot(model.value_parameters)
    health = update(model, batch, settings(), done=0).health
    assert health["ev_before"] is None
    assert health["ev_after"] is None
    assert changed(model.value_parameters, before) == before.keys()


def test_what_dis_rejects_does_not_train(model: LoraModel) -> None:
    batch = [replace(t, behaviour_logprobs=torch.full_like(t.behaviour_logprobs, -40.0)) for t in two_prefix_batch()]
    before = snapshot(model.policy_parameters)
    result = update(model, batch, settings(anchor_coefficient=0.0, policy_steps=3))
    assert changed(model.policy_parameters, before) == set()
    assert result.health["masked_high"] == [1.0, 1.0, 1.0]
    assert all(summary.masked_share == 1.0 for summary in result.summaries.values())


def test_ratios_are_recomputed_before_every_policy_step(fresh_model: LoraModel) -> None:
    """With the behaviour's own log-probs nothing is masked at first; large steps then leave the band."""
    plan = fresh_model.plan(two_prefix_batch(), 4096)
    now = fresh_model.logprobs(fresh_model.read_states("policy", plan), plan.temperatures)
    taken = now.gather(1, plan.action_ids[:, None]).squeeze(1).detach()
    parts = taken.split([t.action_positions.numel() for t in two_prefix_batch()])
    batch = [replace(t, behaviour_logprobs=part) for t, part in zip(two_prefix_batch(), parts, strict=True)]
    health = update(fresh_model, batch, settings(policy_lr=0.05, policy_steps=4)).health
    masked = [low + high for low, high in zip(health["masked_low"], health["masked_high"], strict=True)]  # type: ignore[call-overload]
    assert masked[0] == 0.0
    assert max(masked[1:]) > 0.0
    assert health["k3"] == pytest.approx(0.0, abs=1e-6)
    assert health["mean_abs_log_ratio"] == pytest.approx(0.0, abs=1e-4)
    assert health["effective_sample_share"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("budget", "clip"), [(1, "dis"), (30, "dis"), (100, "dis"), (1, "ppo"), (30, "ppo"), (1, "none"), (30, "none")]
)
def test_an_update_does_not_depend_on_the_micro_batch_size(
    tiny_model: Path, tmp_path: Path, model: LoraModel, budget: int, clip: str
) -> None:
    state = snapshot(model.policy_parameters | model.value_parameters)
    figures = []
    for tokens in (4096, budget):
        for name, parameter in (model.policy_parameters | model.value_parameters).items():
            parameter.data.copy_(state[name])
        chosen = settings(tokens_per_micro_batch=tokens, policy_steps=1, clip=clip)
        figures.append(update(model, two_prefix_batch(), chosen))
    whole, split = figures
    for name in ("value_grad_norms", "policy_grad_norms", "ev_after", "k3", "entropy", "base_kl", "masked_low"):
        assert split.health[name] == pytest.approx(whole.health[name], rel=1e-4, abs=1e-6), name
    for rollout, summary in whole.summaries.items():
        assert split.summaries[rollout].advantage_mean == pytest.approx(summary.advantage_mean, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [LoraModel, FullModel])
@pytest.mark.parametrize("budget", [4096, 30])
def test_a_policy_step_does_not_depend_on_how_many_logits_are_in_memory(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[LoraModel] | type[FullModel],
    budget: int,
    dtype: Dtype,
) -> None:
    chosen = settings(tokens_per_micro_batch=budget, policy_steps=1, policy_optimiser="adamw")
    start = tiny_model
    if kind is LoraModel:
        start = Path(write_version_zero("p", UUID(int=1), tiny_model, chosen, tmp_path).path)
    gradients = []
    for tokens in (4096, 3):
        monkeypatch.setattr("learner.policy_step.TOKENS_PER_PART", tokens)
        model = kind(tiny_model, dtype, chosen, start)
        kept: dict[str, Tensor] = {}

        def keep(_: Any, parameters: Any, *rest: Any, kept: dict[str, Tensor] = kept) -> float:
            kept |= {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            return 1.0

        monkeypatch.setattr("learner.policy_step.clip_and_step", keep)
        update(model, two_prefix_batch(), chosen)
        assert kept.keys() == model.policy_parameters.keys()
        gradients.append(kept)
    whole, parts = gradients
    assert max(gradient.abs().max().item() for gradient in whole.values()) > 1e-3
    for name, gradient in whole.items():
        # the states' gradient is in their dtype, and a matrix product's rounding depends on how many rows it has
        tolerance = 1e-5 if dtype == "float32" else 0.02
        error = (parts[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < tolerance, name


def test_the_figures_of_staleness_zero_and_of_segments(model: LoraModel) -> None:
    batch = two_prefix_batch()
    batch[1] = replace(batch[1], rollout_id=batch[0].rollout_id, segment=1)
    result = update(model, batch, settings(), done=0)
    total = sum(t.action_positions.numel() for t in batch)
    histogram = {str(s): sum(t.action_positions.numel() for i, t in enumerate(batch) if i % 3 == s) for s in range(3)}
    assert result.health["staleness"] == histogram
    assert result.health["action_tokens"] == total
    assert result.health["mean_reward"] == pytest.approx(sum(float(t.rewards.sum()) for t in batch) / len(batch))
    assert result.health["k3_fresh"] != result.health["k3"]
    assert len(result.summaries) == len(batch) - 1
    tokens = batch[0].action_positions.numel() + batch[1].action_positions.numel()
    assert result.summaries[batch[0].rollout_id].action_tokens == tokens
    assert set(result.seconds) == {"critic", "anchor", "policy"}
    assert all(math.isfinite(s) for s in result.seconds.values())


def test_a_gradient_that_is_not_finite_stops_the_update(model: LoraModel) -> None:
    batch = two_prefix_batch()
    batch[3].rewards[-1] = float("inf")
    before = snapshot(model.policy_parameters | model.value_parameters)
    with pytest.raises(TrainingDiverged, match="the critic's gradient is not finite"):
        update(model, batch, settings())
    assert changed(model.policy_parameters | model.value_parameters, before) == set()


def test_a_policy_gradient_that_is_not_finite_leaves_the_policy_alone(model: LoraModel) -> None:
    next(iter(model.policy_parameters.values())).data.fill_(float("nan"))
    before = snapshot(model.policy_parameters)
    with pytest.raises(TrainingDiverged, match="the policy's gradient is not finite"):
        update(model, two_prefix_batch(), settings())
    assert all(torch.equal(p.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, p in model.policy_parameters.items())


def test_the_learning_rate_rises_over_the_first_policy_updates(model: LoraModel) -> None:
    chosen = settings(critic_warmup_updates=2, lr_warmup_updates=3, policy_steps=1)
    optimisers = build_optimisers(model, chosen)
    rates = []
    for done in range(2, 8):
        run_update(model, optimisers, two_prefix_batch(), chosen, done, shortfall=1.0)
        rates.append(optimisers.policy.param_groups[0]["lr"] / chosen.policy_lr)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("follows", "share"), [(True, 0.3), (False, 1.0)])
def test_the_learning_rate_follows_what_is_left_to_gain(model: LoraModel, follows: bool, share: float) -> None:
    chosen = settings(lr_follows_shortfall=follows, policy_steps=1)
    optimisers = build_optimisers(model, chosen)
    result = run_update(model, optimisers, two_prefix_batch(), chosen, 10, shortfall=0.3)
    assert optimisers.policy.param_groups[0]["lr"] == pytest.approx(share * chosen.policy_lr)
    assert result.health["policy_lr"] == pytest.approx(share * chosen.policy_lr)
    assert result.health["reward_shortfall"] == 0.3


@pytest.mark.parametrize(("optimiser", "watched"), [("preconditioned", True), ("adamw", False)])
def test_the_preconditioned_optimiser_sees_every_b(model: LoraModel, optimiser: str, watched: bool) -> None:
    chosen = settings(policy_optimiser=optimiser)
    optimisers = build_optimisers(model, chosen)
    run_update(model, optimisers, two_prefix_batch(), chosen, 10, shortfall=1.0)
    seen = {n for n, p in model.policy_parameters.items() if "W" in optimisers.policy.state[p]}
    assert seen == ({n for n in model.policy_parameters if ".lora_B." in n} if watched else set())
