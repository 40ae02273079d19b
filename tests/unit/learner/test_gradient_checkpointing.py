"""Layers computed again in the backward pass give the gradients that they gave, shared prefixes and all."""

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.full_model import FullModel
from learner.gradient_checkpointing import checkpoint_layers
from learner.lora_model import LoraModel
from learner.model import LearnerModel, Role, _SharedPrefix
from learner.optimisers import build_optimisers
from learner.plan import MicroBatch, plan_batch
from learner.prepare import write_version_zero
from learner.step import run_update
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import full_settings

Build = Callable[..., LearnerModel]


@pytest.fixture(params=["lora", "full"])
def build(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Build:
    """One model per call, away from its base by the same random step."""

    def built(checkpointing: bool, dtype: Dtype = "float32") -> LearnerModel:
        model: LearnerModel
        if request.param == "lora":
            settings = LearningSettings(lora_rank=4, value_rank=4, gradient_checkpointing=checkpointing)
            zero = write_version_zero("p", UUID(int=1), tiny_model, settings, tmp_path)
            model = LoraModel(tiny_model, dtype, settings, Path(zero.path))
        else:
            model = FullModel(tiny_model, dtype, full_settings(gradient_checkpointing=checkpointing), tiny_model)
        generator = torch.Generator().manual_seed(3)
        for parameter in (model.policy_parameters | model.value_parameters).values():
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
        return model

    return built


def gradients(model: LearnerModel, role: Role, budget: int) -> dict[str, Tensor]:
    plan = plan_batch(two_prefix_batch(), budget)

    def loss(states: Tensor, micro_batch: MicroBatch) -> Tensor:
        if role == "value":
            return (model.values(states) - 1).square().sum() / plan.token_count
        logprobs = model.logprobs(states, plan.temperatures[micro_batch.index])
        return logprobs.gather(1, plan.action_ids[micro_batch.index][:, None]).sum() / plan.token_count

    parameters = model.policy_parameters if role == "policy" else model.value_parameters
    model.accumulate_gradients(role, plan, loss)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("role", ["policy", "value"])
def test_gradients_are_the_same(build: Build, role: Role, budget: int, dtype: Dtype) -> None:
    expected = gradients(build(False, dtype), role, budget)
    found = gradients(build(True, dtype), role, budget)
    assert found.keys() == expected.keys()
    assert len(expected) > 10
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tokens_per_part", [3, 128])
def test_an_update_is_the_same(build: Build, monkeypatch: pytest.MonkeyPatch, tokens_per_part: int) -> None:
    """Hooks that watch the forward pass (the preconditioner's) must not count a layer twice."""
    monkeypatch.setattr("learner.policy_step.TOKENS_PER_PART", tokens_per_part)
    weights = []
    for checkpointing in (False, True):
        model = build(checkpointing)
        settings = LearningSettings(lora_rank=4, value_rank=4) if isinstance(model, LoraModel) else full_settings()
        run_update(
            model, build_optimisers(model, settings), two_prefix_batch(), settings, updates_done=5, shortfall=1.0
        )
        weights.append({n: p.detach().clone() for n, p in (model.policy_parameters | model.value_parameters).items()})
    for name, weight in weights[1].items():
        torch.testing.assert_close(weight, weights[0][name], rtol=1e-5, atol=1e-5, msg=name)


def test_layers_run_again_and_without_dropout(build: Build) -> None:
    model = build(True)
    runs: list[str] = []
    layers = [(n, m) for n, m in model._decoder.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    assert len(layers) == 2
    for name, layer in layers:
        assert not layer.self_attn.training  # where a model's own dropout is
        layer.self_attn.register_forward_hook(lambda *_, name=name: runs.append(name))
    gradients(model, "policy", 24)
    groups = plan_batch(two_prefix_batch(), 24).groups
    passes = sum(len(group.micro_batches) + (group.prefix_ids.numel() > 0) for group in groups)
    assert len(runs) == 2 * 2 * passes


def test_a_layer_that_runs_again_records_no_second_prefix(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the recomputed activations of every layer at once."""
    recorded: list[int] = []
    backward = _SharedPrefix.backward

    def counting(prefix: _SharedPrefix) -> None:
        backward(prefix)
        recorded.append(len(prefix._outputs.keys))

    monkeypatch.setattr(_SharedPrefix, "backward", counting)
    gradients(build(True), "policy", 4096)
    assert sorted(recorded) == [0, 2, 2]  # layers per group; one group shares nothing


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="switch the setting off"):
        checkpoint_layers(nn.Linear(2, 2))
