"""States, log-probs, values and gradients of the one base under two adapters."""

from pathlib import Path
from uuid import UUID

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.model import Role
from learner.plan import MicroBatch, plan_batch
from learner.prepare import write_version_zero
from learner.trajectory import Trajectory
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS


def plain_logprobs(directory: Path, adapter: Path | None, trajectory: Trajectory) -> Tensor:
    """Log-probs of the action tokens by transformers and peft alone, one unpadded sequence at a time."""
    plain = AutoModelForCausalLM.from_pretrained(directory)
    if adapter is not None:
        plain = PeftModel.from_pretrained(plain, str(adapter))
    with torch.no_grad():
        logits = plain(trajectory.token_ids.unsqueeze(0)).logits[0, trajectory.action_positions - 1]
    tempered = (logits / trajectory.temperatures[:, None]).log_softmax(-1)
    return tempered.gather(1, trajectory.token_ids[trajectory.action_positions][:, None]).squeeze(1)


@pytest.mark.parametrize("budget", [16, 4096])
def test_logprobs_are_those_of_plain_peft(model: LoraModel, tiny_model: Path, tmp_path: Path, budget: int) -> None:
    batch = two_prefix_batch()
    plan = model.plan(batch, budget)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    model.export_policy(adapter)
    for role, saved in (("policy", adapter), ("base", None)):
        logprobs = model.logprobs(model.read_states(role, plan), plan.temperatures)
        assert logprobs.shape == (plan.token_count, 97)
        taken = logprobs.gather(1, plan.action_ids[:, None]).squeeze(1)
        expected = torch.cat([plain_logprobs(tiny_model, saved, t) for t in batch])
        torch.testing.assert_close(taken, expected, rtol=0, atol=2e-5)


def test_values_are_of_the_state_before_the_token(model: LoraModel) -> None:
    """Changing an action token and all after it must leave its own value alone and change the next one's."""
    batch = two_prefix_batch()
    plan = model.plan(batch, 4096)
    before = model.values(model.read_states("value", plan))
    changed = batch[2].token_ids.clone()
    changed[batch[2].action_positions[1] :] = 5
    batch[2] = Trajectory(**{**batch[2].__dict__, "token_ids": changed})
    after = model.values(model.read_states("value", model.plan(batch, 4096)))
    start = batch[0].action_positions.numel() + batch[1].action_positions.numel()
    torch.testing.assert_close(after[: start + 2], before[: start + 2], rtol=0, atol=1e-5)
    assert (after[start + 2 : start + 5] - before[start + 2 : start + 5]).abs().min() > 1e-4


def gradients(model: LoraModel, role: Role, batch: list[Trajectory], budget: int, share: bool) -> dict[str, Tensor]:
    """Of a loss that weighs every action token differently, normalised by the whole batch's count."""
    plan = plan_batch(batch, budget, share_prefixes=share)
    weights = torch.linspace(-1, 2, plan.token_count)

    def policy_loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        logprobs = model.logprobs(states, plan.temperatures[micro_batch.index])
        taken = logprobs.gather(1, plan.action_ids[micro_batch.index][:, None]).squeeze(1)
        return (weights[micro_batch.index] * taken).sum() / plan.token_count

    def value_loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        return (model.values(states) - weights[micro_batch.index]).square().sum() / plan.token_count

    parameters = model.policy_parameters if role == "policy" else model.value_parameters
    for parameter in parameters.values():
        parameter.grad = None
    model.accumulate_gradients(role, plan, policy_loss if role == "policy" else value_loss)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("role", ["policy", "value"])
def test_gradients_do_not_depend_on_sharing_or_on_the_micro_batch_size(
    model: LoraModel, role: Role, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused:  # what a batch of long suffixes takes
        monkeypatch.setattr("learner.attention.MAX_SCORES", 0)
    batch = two_prefix_batch()
    expected = gradients(model, role, batch, budget=1, share=False)
    parameters = model.policy_parameters if role == "policy" else model.value_parameters
    assert expected.keys() == parameters.keys()
    assert min(g.abs().max().item() for g in expected.values()) > 1e-3
    longest = max(t.token_ids.numel() for t in batch)
    for budget in (*range(1, 2 * longest, 7), 4096):
        for name, gradient in gradients(model, role, batch, budget, share=True).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=f"{name}, budget {budget}")


def test_a_shared_prefix_runs_once(model: LoraModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    forward = model.decoder_forward

    def counting(token_ids: Tensor, *args: object, **options: object) -> object:
        fed.append(token_ids.numel())
        return forward(token_ids, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "decoder_forward", counting)
    batch = two_prefix_batch()
    gradients(model, "policy", batch, budget=24, share=True)
    assert fed.count(40) == fed.count(60) == 1
    assert len(fed) > 6
    assert sum(fed) < 0.6 * sum(t.token_ids.numel() for t in batch)


def test_the_value_model_trains_no_attention_weight_and_the_policy_not_the_head(model: LoraModel) -> None:
    value, policy = model.value_parameters, model.policy_parameters
    assert {n for n in value if "lora" not in n} == {"value_head.weight", "value_head.bias"}
    assert all(".mlp." in n for n in value if "lora" in n)
    assert sum("self_attn" in n for n in policy) == 2 * 4 * 2  # q, k, v, o; A and B; two layers
    assert not value.keys() & policy.keys()
    trained = {id(p) for p in (value | policy).values()}
    assert all(id(p) in trained for p in model.peft.parameters() if p.requires_grad)


def test_top_logprobs_are_those_of_the_next_token(model: LoraModel, tiny_model: Path) -> None:
    prompts = [[*range(3, 50), 7], [*range(3, 50), 9, 11], [5, 6]]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    for prompt, top in zip(prompts, model.top_logprobs("base", prompts, 20), strict=True):
        expected = plain(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(20)
        assert [token for token, _ in top] == expected.indices.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(expected.values.tolist(), abs=2e-5)
    assert model.top_logprobs("policy", prompts, 20) != model.top_logprobs("base", prompts, 20)


def test_an_adapter_of_another_rank_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    zero = write_version_zero("p", UUID(int=1), tiny_model, LearningSettings(lora_rank=8), tmp_path)
    with pytest.raises(ValueError, match="another adapter"):
        LoraModel(tiny_model, "float32", SETTINGS, Path(zero.path))


def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    base = tmp_path / "mistral"
    MistralForCausalLM(config).save_pretrained(base)
    zero = write_version_zero("p", UUID(int=1), base, SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="without full attention"):
        LoraModel(base, "float32", SETTINGS, Path(zero.path))


def test_a_model_that_rescales_its_logits_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, logits_scaling=8.0, initializer_range=0.5, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    base = tmp_path / "granite"
    GraniteForCausalLM(config).save_pretrained(base)
    zero = write_version_zero("p", UUID(int=1), base, SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="does not reproduce"):
        LoraModel(base, "float32", SETTINGS, Path(zero.path))
