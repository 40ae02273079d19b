"""The policy step against plain transformers and peft: it is the documented gradient, whatever the settings."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.trajectory import Trajectory
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.updates import changed, settings, snapshot, update
from tests.unit.sao.reference import group_advantages

EARLIER_RETURNS = [9.0] * 5 + [i / 128 for i in range(128)]
"""The oldest five are forgotten: 128 are kept."""


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
    ("whiten", "centring", "follows", "where_failing", "several", "advantage", "clip"),
    [
        (False, 0.0, False, 0.0, False, "value", "dis"),
        (True, 0.0, False, 0.0, False, "value", "dis"),
        (False, 0.9, False, 0.0, False, "value", "dis"),
        (False, 0.0, True, 0.0, False, "value", "dis"),
        (False, 0.0, False, 0.0, False, "running_mean", "dis"),
        (True, 0.0, False, 0.0, False, "running_mean", "dis"),
        (False, 0.9, False, 0.0, False, "group", "dis"),
        (False, 0.0, False, 0.0, False, "value", "ppo"),
        (False, 0.9, False, 0.0, False, "group", "ppo"),
        (False, 0.9, False, 0.0, False, "value", "none"),
        (False, 0.9, True, 0.3, False, "value", "dis"),
        (False, 0.0, False, 0.3, False, "value", "dis"),
        (False, 0.0, False, 0.3, True, "value", "dis"),
        (False, 0.0, False, 0.3, False, "group", "dis"),
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
            settled = pi.detach().exp().square().sum() ** 2
            loss = loss + (0.1 + where_failing * failing * settled) * (anchor.exp() * (anchor - pi)).sum()
            place += 1
    for opens in (True, False):
        kind = [(pi, push) for opening, pi, push in read if opening == opens]
        mobility = [1 - pi.detach().exp().square().sum() for pi, _ in kind]
        pushes = torch.stack([push for _, push in kind])
        chance = len(kind) * pushes.var(0).sum() / pushes.sum(0).square().sum()
        taken_out = min(1.0, 4.0 * float(chance))  # of an update that none was before
        common = taken_out * pushes.sum(0) / max(1.0, float(sum(mobility)))
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
