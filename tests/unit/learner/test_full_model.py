"""A policy and a critic in all their weights: what trains, in which precision, and against what."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.full_model import ATTENTION_BLOCKS, FullModel, freeze
from learner.model import Role
from learner.optimisers import build_optimisers
from learner.plan import MicroBatch, plan_batch
from learner.step import run_update
from learner.trajectory import Trajectory
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import full_settings


def load(directory: Path, dtype: Dtype = "float32", **changes: object) -> FullModel:
    return FullModel(directory, dtype, full_settings(**changes), directory)


def disturbed(model: FullModel, scale: float = 0.02) -> FullModel:
    """With policy, critic and value head away from the base and from each other."""
    generator = torch.Generator().manual_seed(3)
    for parameter in (model.policy_parameters | model.value_parameters).values():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


def taken(model: FullModel, role: Role, batch: list[Trajectory], budget: int = 4096) -> Tensor:
    plan = model.plan(batch, budget)
    with torch.no_grad():
        logprobs = model.logprobs(model.read_states(role, plan), plan.temperatures, role)
    return logprobs.gather(1, plan.action_ids[:, None]).squeeze(1)


def plain_logprobs(directory: Path, batch: list[Trajectory]) -> Tensor:
    """By transformers alone, in the dtype of the directory's files, one unpadded sequence at a time."""
    plain = AutoModelForCausalLM.from_pretrained(directory)
    rows = []
    for t in batch:
        with torch.no_grad():
            logits = plain(t.token_ids.unsqueeze(0)).logits[0, t.action_positions - 1].float()
        tempered = (logits / t.temperatures[:, None]).log_softmax(-1)
        rows.append(tempered.gather(1, t.token_ids[t.action_positions][:, None]).squeeze(1))
    return torch.cat(rows)


@pytest.mark.parametrize("budget", [16, 4096])
def test_float32_logprobs_are_those_of_plain_transformers(tiny_model: Path, tmp_path: Path, budget: int) -> None:
    model, batch = disturbed(load(tiny_model)), two_prefix_batch()
    model.export_policy(tmp_path)
    torch.testing.assert_close(
        taken(model, "policy", batch, budget), plain_logprobs(tmp_path, batch), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        taken(model, "base", batch, budget), plain_logprobs(tiny_model, batch), rtol=0, atol=1e-4
    )
    assert (taken(model, "policy", batch) - taken(model, "base", batch)).abs().max() > 0.1


def test_bfloat16_logprobs_are_those_of_the_rounded_weights(tiny_model: Path, tmp_path: Path) -> None:
    """The masters differ from what is served by up to half a bfloat16 step; the forward pass must not."""
    model, batch = disturbed(load(tiny_model, "bfloat16")), two_prefix_batch()
    model.export_policy(tmp_path)
    ours, engine = taken(model, "policy", batch), plain_logprobs(tmp_path, batch)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in exact.named_parameters():
        assert torch.equal(weight, model.policy_parameters[name].bfloat16().float()), name
    difference = (ours - engine).abs()
    print(
        f"bfloat16, learner against plain transformers: mean {difference.mean():.4f}, max {difference.max():.4f} nats"
    )
    assert difference.mean() < 0.05


def gradients(model: FullModel, role: Role, batch: list[Trajectory], budget: int, share: bool) -> dict[str, Tensor]:
    """Of a loss that weighs every action token differently, normalised by the whole batch's count."""
    plan = plan_batch(batch, budget, share_prefixes=share)
    weights = torch.linspace(-1, 2, plan.token_count)

    def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        wanted = weights[micro_batch.index]
        if role == "value":
            return (model.values(states) - wanted).square().sum() / plan.token_count
        logprobs = model.logprobs(states, plan.temperatures[micro_batch.index])
        chosen = logprobs.gather(1, plan.action_ids[micro_batch.index][:, None]).squeeze(1)
        return (wanted * chosen).sum() / plan.token_count

    parameters = model.policy_parameters if role == "policy" else model.value_parameters
    for parameter in parameters.values():
        parameter.grad = None
    model.accumulate_gradients(role, plan, loss)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("role", ["policy", "value"])
def test_an_update_has_one_gradient_whatever_the_micro_batches(tiny_model: Path, role: Role) -> None:
    model, batch = disturbed(load(tiny_model)), two_prefix_batch()
    expected = gradients(model, role, batch, budget=1, share=False)
    parameters = model.policy_parameters if role == "policy" else model.value_parameters
    assert expected.keys() == parameters.keys()
    assert min(g.abs().max().item() for g in expected.values()) > 1e-3
    for budget in (*range(1, 140, 23), 4096):
        for name, gradient in gradients(model, role, batch, budget, share=True).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=f"{name}, budget {budget}")


def test_the_policy_gradient_is_that_of_plain_autograd(tiny_model: Path, tmp_path: Path) -> None:
    """The embedding is the output layer too: its gradient is the sum of both."""
    model, batch = disturbed(load(tiny_model)), two_prefix_batch()
    model.export_policy(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = torch.linspace(-1, 2, sum(t.action_positions.numel() for t in batch))
    place, loss = 0, torch.zeros(())
    for t in batch:
        logits = plain(t.token_ids.unsqueeze(0)).logits[0, t.action_positions - 1]
        logprobs = (logits / t.temperatures[:, None]).log_softmax(-1)
        for row, token in zip(logprobs, t.token_ids[t.action_positions], strict=True):
            loss = loss + weights[place] * row[token] / len(weights)
            place += 1
    loss.backward()
    found = gradients(model, "policy", batch, budget=24, share=True)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_bfloat16_gradients_of_micro_batches_are_summed_in_float32(tiny_model: Path) -> None:
    """A bfloat16 sum of equal summands stops growing at 256 of them."""
    model = disturbed(load(tiny_model, "bfloat16"))
    one = two_prefix_batch()[8]

    def summed(copies: int) -> dict[str, Tensor]:
        plan = plan_batch([one] * copies, 1, share_prefixes=False)

        def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
            return -model.logprobs(states, plan.temperatures[micro_batch.index])[:, 5].sum()

        for parameter in model.policy_parameters.values():
            parameter.grad = None
        model.accumulate_gradients("policy", plan, loss)
        return {n: p.grad.clone() for n, p in model.policy_parameters.items() if p.grad is not None}

    single, many = summed(1), summed(600)
    assert single.keys() == model.policy_parameters.keys()
    for name, gradient in many.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, 600 * single[name], rtol=1e-3, atol=1e-3, msg=name)


def test_a_step_below_bfloat16s_resolution_is_not_lost(tiny_model: Path) -> None:
    """1e-6 is a 2,000th of what separates bfloat16 numbers near 0.5: it arrives after some hundred steps."""
    model = load(tiny_model, "bfloat16")
    name, master = next(iter(model.policy_parameters.items()))
    before = model.served_policy()[name]
    with torch.no_grad():
        for _ in range(200):
            master.add_(1e-6)
    assert master.dtype == torch.float32
    torch.testing.assert_close(master.detach(), before.float() + 2e-4, rtol=0, atol=2e-5)
    assert not torch.equal(model.served_policy()[name], before)


def attention(model: FullModel) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model._value.named_parameters() if ".self_attn." in n}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_critic_trains_everything_but_attention(tiny_model: Path, dtype: Dtype) -> None:
    model = load(tiny_model, dtype, value_lr=1e-2, critic_steps=3)
    before = {n: p.detach().clone() for n, p in model.value_parameters.items()}
    frozen, base = attention(model), model._base
    assert base is not None
    base_before = {n: p.detach().clone() for n, p in base.named_parameters()}
    assert len(frozen) == 2 * 4
    assert not any("self_attn" in name for name in before)
    optimisers = build_optimisers(model, full_settings(value_lr=1e-2, critic_steps=3))
    result = run_update(
        model,
        optimisers,
        two_prefix_batch(),
        full_settings(value_lr=1e-2, critic_steps=3),
        updates_done=5,
        shortfall=1.0,
    )
    assert result.policy_changed
    moved = {n for n, p in model.value_parameters.items() if not torch.equal(p, before[n])}
    assert moved == before.keys()
    assert {"value.embed_tokens.weight", "value.norm.weight", "value_head.weight"} <= moved
    assert all(torch.equal(weight, frozen[name]) for name, weight in attention(model).items())
    assert all(torch.equal(p, base_before[n]) for n, p in base.named_parameters())
    trained = {id(p) for group in optimisers.value.param_groups for p in group["params"]}
    assert not trained & {id(p) for n, p in model._value.named_parameters() if "self_attn" in n}


def test_attention_norms_are_frozen_too(tmp_path: Path) -> None:
    """Qwen3 normalises queries and keys inside its attention block."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert {n for n in model.policy_parameters if n.endswith(("q_norm.weight", "lm_head.weight"))} == {
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.weight",
    }
    assert not any("q_norm" in n or "lm_head" in n for n in model.value_parameters)


def test_a_freeze_pattern_that_matches_nothing_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="nothing of it would be frozen"):
        freeze(nn.Sequential(nn.Linear(2, 2)), ATTENTION_BLOCKS)
    model = nn.Module()
    model.self_attn = nn.Linear(2, 2)
    model.mlp = nn.Linear(2, 2)
    assert freeze(model, ATTENTION_BLOCKS) == ["self_attn.weight", "self_attn.bias"]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_the_anchors_base_has_its_own_output_layer(tiny_model: Path) -> None:
    """Tied embeddings: once the policy has moved, its output layer says nothing about the base."""
    model, batch = load(tiny_model), two_prefix_batch()
    plan = model.plan(batch, 4096)
    states = model.read_states("base", plan)
    before = model.logprobs(states, plan.temperatures, "base")
    disturbed(model, 0.1)
    after = model.logprobs(states, plan.temperatures, "base")
    assert torch.equal(before, after)
    assert (model.logprobs(states, plan.temperatures, "policy") - before).abs().max() > 0.1


def test_without_an_anchor_there_is_no_base(tiny_model: Path) -> None:
    model = load(tiny_model, anchor_coefficient=0.0)
    assert model._base is None
    with pytest.raises(ValueError, match="anchor_coefficient is 0"):
        model.top_logprobs("base", [[3, 4]], 5)
    chosen = full_settings(anchor_coefficient=0.0)
    run_update(model, build_optimisers(model, chosen), two_prefix_batch(), chosen, updates_done=5, shortfall=1.0)


def test_an_update_moves_every_policy_weight_and_raises_what_it_should(tiny_model: Path) -> None:
    """Rewards push towards the sampled tokens: with equal positive advantages their log-probs rise."""
    chosen = full_settings(
        policy_lr=1e-3, policy_steps=1, centring=0.0, anchor_coefficient=0.0, critic_steps=1, lr_warmup_updates=0
    )
    model, batch = load(tiny_model, anchor_coefficient=0.0), two_prefix_batch()
    for trajectory in batch:
        trajectory.rewards.fill_(0.0)
        trajectory.rewards[-1] = 1.0
    before = {n: p.detach().clone() for n, p in model.policy_parameters.items()}
    old = taken(model, "policy", batch)
    parts = old.split([t.action_positions.numel() for t in batch])
    batch = [Trajectory(**{**t.__dict__, "behaviour_logprobs": part}) for t, part in zip(batch, parts, strict=True)]
    run_update(model, build_optimisers(model, chosen), batch, chosen, updates_done=5, shortfall=1.0)
    assert all(not torch.equal(p, before[n]) for n, p in model.policy_parameters.items())
    assert (taken(model, "policy", batch) - old).mean() > 0.05


def test_the_preconditioned_optimiser_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="is for LoRA"):
        build_optimisers(load(tiny_model), LearningSettings(policy_optimiser="preconditioned"))


def test_top_logprobs_are_those_of_the_policy(tiny_model: Path, tmp_path: Path) -> None:
    model = disturbed(load(tiny_model))
    model.export_policy(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    (top,) = model.top_logprobs("policy", [[*range(3, 50), 7]], 20)
    expected = plain(torch.tensor([[*range(3, 50), 7]])).logits[0, -1].log_softmax(-1).topk(20)
    assert [token for token, _ in top] == expected.indices.tolist()
    assert [logprob for _, logprob in top] == pytest.approx(expected.values.tolist(), abs=1e-4)
