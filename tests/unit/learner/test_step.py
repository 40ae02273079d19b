"""One update: what trains when, and that it is the documented loss that trains."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.step import TrainingDiverged, UpdateResult, run_update
from learner.trajectory import Trajectory
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS
from tests.unit.sao.reference import group_advantages

EARLIER_RETURNS = [9.0] * 5 + [i / 128 for i in range(128)]
"""The oldest five are forgotten: 128 are kept."""


def settings(**changes: Any) -> LearningSettings:
    return LearningSettings(**{"lora_rank": 4, "value_rank": 4, **changes})


def update(
    model: LoraModel,
    batch: list[Trajectory],
    chosen: LearningSettings,
    done: int = 10,
    shortfall: float = 1.0,
    earlier_returns: Sequence[float] = (),
) -> UpdateResult:
    return run_update(model, build_optimisers(model, chosen), batch, chosen, done, shortfall, earlier_returns)


def snapshot(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def changed(parameters: dict[str, Any], before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in parameters.items() if not torch.equal(p, before[name])}


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


def reference_expected_rewards(batch: list[Trajectory], values: list[float]) -> list[float]:
    """Per token V over the rewards to come, or over what the batch usually has to come there, if that is more."""
    places = [
        (sum(counts[:t]), sum(counts[t:]))
        for counts in (b.reward_counts.tolist() for b in batch)
        for t in range(len(counts))
    ]
    usual = {before: statistics.fmean(n for at, n in places if at == before) for before, _ in places}
    return [max(v / n, v / usual[before]) for v, (before, n) in zip(values, places, strict=True)]


def reference_advantages(batch: list[Trajectory], values: Tensor, chosen: LearningSettings) -> list[list[float]]:
    """Token by token; for SAO's critic A_t = sum_k (gamma lambda)^k delta_(t+k). Every trajectory has one reward, its
    last: its return."""
    if chosen.advantage == "running_mean":
        mean = sum(EARLIER_RETURNS[-128:]) / 128
        counts = [t.action_positions.numel() for t in batch]
        ends = [float(t.rewards[-1]) for t in batch]
        return [[r * chosen.gamma ** (n - 1 - i) - mean for i in range(n)] for n, r in zip(counts, ends, strict=True)]
    if chosen.advantage == "group":
        returns = [t.rollout_return for t in batch]
        grouped = group_advantages(returns, [int(t.group or 0) for t in batch])
        return [[a] * t.action_positions.numel() for a, t in zip(grouped, batch, strict=True)]
    result, start = [], 0
    for trajectory in batch:
        count = trajectory.action_positions.numel()
        v = [*values[start : start + count].tolist(), 0.0]
        lam = 1 - 1 / (chosen.alpha * trajectory.rollout_action_tokens)
        deltas = [float(trajectory.rewards[t]) + chosen.gamma * v[t + 1] - v[t] for t in range(count)]
        result.append([sum((chosen.gamma * lam) ** k * deltas[t + k] for k in range(count - t)) for t in range(count)])
        start += count
    return result


def reference_weight(ratio: Tensor, advantage: Tensor, clip: str) -> Tensor:
    """What multiplies A grad log pi, from the derivative of each objective in the ratio."""
    if clip == "dis":
        return ratio if 0.2 < ratio < 4.0 else torch.zeros(())
    if clip == "ppo":
        at = ratio.clone().requires_grad_()
        torch.minimum(at * advantage, at.clamp(0.2, 4.0) * advantage).backward()
        assert at.grad is not None
        return ratio * at.grad / advantage
    return ratio


@pytest.mark.parametrize(
    ("whiten", "centring", "follows", "where_failing", "power", "several", "advantage", "clip"),
    [
        (False, 0.0, False, 0.0, 0.0, False, "value", "dis"),
        (True, 0.0, False, 0.0, 0.0, False, "value", "dis"),
        (False, 0.9, False, 0.0, 0.0, False, "value", "dis"),
        (False, 0.0, True, 0.0, 0.0, False, "value", "dis"),
        (False, 0.0, False, 0.0, 0.0, False, "running_mean", "dis"),
        (True, 0.0, False, 0.0, 0.0, False, "running_mean", "dis"),
        (False, 0.9, False, 0.0, 0.0, False, "group", "dis"),
        (False, 0.0, False, 0.0, 0.0, False, "value", "ppo"),
        (False, 0.9, False, 0.0, 0.0, False, "group", "ppo"),
        (False, 0.9, False, 0.0, 0.0, False, "value", "none"),
        (False, 0.9, True, 0.3, 0.0, False, "value", "dis"),
        (False, 0.0, False, 0.3, 2.0, False, "value", "dis"),
        (False, 0.0, False, 0.3, 0.0, True, "value", "dis"),
        (False, 0.0, False, 0.3, 0.0, False, "group", "dis"),
    ],
)
def test_the_policy_step_is_the_documented_gradient(
    model: LoraModel,
    tiny_model: Path,
    tmp_path: Path,
    whiten: bool,
    centring: float,
    follows: bool,
    where_failing: float,
    power: float,
    several: bool,
    advantage: str,
    clip: str,
) -> None:
    """Against plain transformers and peft, one unpadded sequence at a time, one AdamW step."""
    chosen = settings(
        advantage=advantage,
        clip=clip,
        policy_optimiser="adamw",
        policy_steps=1,
        gamma=0.9,
        whiten_advantages=whiten,
        anchor_coefficient=0.1 / 0.75 if follows else 0.1,  # three quarters of it at a shortfall of one half
        anchor_follows_shortfall=follows,
        anchor_where_failing=where_failing / (0.1 / 0.75 if follows else 0.1),
        anchor_settled_power=power,
        lr_follows_shortfall=False,
        centring=centring,
    )
    start = tmp_path / "start"
    start.mkdir()
    model.export_policy(start)
    before = snapshot(model.policy_parameters)
    plan = model.plan(two_prefix_batch(), 4096)
    now = model.logprobs(model.read_states("policy", plan), plan.temperatures)
    taken = now.gather(1, plan.action_ids[:, None]).squeeze(1).detach()
    shift = torch.linspace(-2.5, 2.5, plan.token_count)  # ratios on both sides of the band
    batch: list[Trajectory] = []
    first = 0
    for trajectory in two_prefix_batch():
        last = first + trajectory.action_positions.numel()
        behaviour = (taken - shift)[first:last]
        counts = torch.ones_like(trajectory.reward_counts) if several and len(batch) % 2 else trajectory.reward_counts
        changes = {"behaviour_logprobs": behaviour, "reward_counts": counts, "group": str(len(batch) % 3)}
        batch.append(replace(trajectory, **changes))
        first = last

    value = snapshot(model.value_parameters)
    result = update(model, batch, chosen, shortfall=0.5, earlier_returns=EARLIER_RETURNS)
    assert changed(model.value_parameters, value) == (value.keys() if advantage == "value" else set())
    with torch.no_grad():
        values = model.values(model.read_states("value", plan))
    advantages = torch.tensor([a for row in reference_advantages(batch, values, chosen) for a in row])
    if whiten:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0).clamp(min=chosen.whiten_floor)

    expected = reference_expected_rewards(batch, values.tolist())

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(start), is_trainable=True)
    loss, place = torch.zeros(()), 0
    read: list[tuple[bool, Tensor, Tensor]] = []  # per token: opens an action?, log pi, push
    for trajectory in batch:
        ids = trajectory.token_ids.unsqueeze(0)
        logits, base_logits = plain(ids).logits[0], base(ids).logits[0].detach()
        for t, position in enumerate(trajectory.action_positions.tolist()):
            pi = (logits[position - 1] / trajectory.temperatures[t]).log_softmax(-1)
            anchor = (base_logits[position - 1] / trajectory.temperatures[t]).log_softmax(-1)
            logprob = pi[trajectory.token_ids[position]]
            ratio = (logprob.detach() - trajectory.behaviour_logprobs[t]).exp()
            weight = reference_weight(ratio, advantages[place], clip) * advantages[place]
            loss = loss - weight * logprob
            push = -weight * pi.detach().exp()
            push[trajectory.token_ids[position]] += weight
            read.append((position - 1 not in trajectory.action_positions, pi, push))
            # rewards from -1 to 1: failing is 1 where 0 or less is expected; without a critic nothing is
            failing = min(1.0, max(0.0, 1.0 - expected[place])) ** 2 if advantage == "value" else 0.0
            settled = pi.detach().exp().square().sum() ** power
            loss = loss + (0.1 + where_failing * failing * settled) * (anchor.exp() * (anchor - pi)).sum()
            place += 1
    for opens in (True, False):
        kind = [(pi, push) for opening, pi, push in read if opening == opens]
        mobility = [1 - pi.detach().exp().square().sum() for pi, _ in kind]
        common = torch.stack([push for _, push in kind]).sum(0) / max(1.0, float(sum(mobility)))
        loss = loss + sum(centring * m * (common * pi).sum() for m, (pi, _) in zip(mobility, kind, strict=True))
    trained = [p for p in plain.parameters() if p.requires_grad]
    (loss / place).backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
    torch.optim.AdamW(trained, lr=chosen.policy_lr, weight_decay=0.0).step()

    assert result.health["policy_grad_norms"] == [pytest.approx(norm, rel=1e-4)]
    low, high = shift <= math.log(0.2), shift >= math.log(4.0)
    assert low.any()
    assert high.any()
    if clip == "ppo":
        low, high = low & (advantages < 0), high & (advantages > 0)
    if clip != "none":
        assert (low | high).any()
        assert result.health["masked_low"] == [pytest.approx(low.double().mean().item(), abs=1e-3)]
        assert result.health["masked_high"] == [pytest.approx(high.double().mean().item(), abs=1e-3)]
    else:
        assert (result.health["masked_low"], result.health["masked_high"]) == ([0.0], [0.0])
    expected = {n.replace(".default.", ".policy."): p.detach() for n, p in plain.named_parameters() if "lora" in n}
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.policy_parameters.items()])
    wanted = torch.cat([(expected[n] - before[n]).flatten() for n in model.policy_parameters])
    assert (moved - wanted).norm() < 1e-2 * wanted.norm()  # AdamW divides by |g|: entries near 0 are noisy


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
