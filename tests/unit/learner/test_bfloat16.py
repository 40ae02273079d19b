"""float32 adapters on a bfloat16 base: what moves, in which dtype, and how near the log-probs stay to float32's."""

from pathlib import Path
from uuid import UUID

import pytest
import torch
from torch import Tensor

from learner.lora_model import LoraModel
from learner.prepare import write_version_zero
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS
from tests.unit.learner.updates import changed, snapshot, update

MEAN_TOLERANCE = 0.1
"""nats per action token: the tiny model's weights are ten times a fresh model's, and so is its rounding."""


@pytest.fixture
def models(tiny_model: Path, tmp_path: Path) -> tuple[LoraModel, LoraModel]:
    """(bfloat16, float32) with the same adapters, away from zero."""
    zero = write_version_zero("p", UUID(int=1), tiny_model, SETTINGS, tmp_path)
    small, exact = (LoraModel(tiny_model, dtype, SETTINGS, Path(zero.path)) for dtype in ("bfloat16", "float32"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in (exact.policy_parameters | exact.value_parameters).items():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
            (small.policy_parameters | small.value_parameters)[name].copy_(parameter)
    return small, exact


def base_weights(model: LoraModel) -> dict[str, Tensor]:
    return {name: p for name, p in model.peft.named_parameters() if ".lora_" not in name}


def taken(model: LoraModel) -> Tensor:
    plan = model.plan(two_prefix_batch(), 4096)
    with torch.no_grad():
        logprobs = model.logprobs(model.read_states("policy", plan), plan.temperatures)
    assert logprobs.dtype == torch.float32
    return logprobs.gather(1, plan.action_ids[:, None]).squeeze(1)


def test_one_update_moves_float32_adapters_and_leaves_the_base_alone(models: tuple[LoraModel, LoraModel]) -> None:
    model, _ = models
    trained = model.policy_parameters | model.value_parameters
    before, base = snapshot(trained), snapshot(base_weights(model))
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    update(model, two_prefix_batch(), SETTINGS)
    assert changed(trained, before) == set(trained)
    assert {p.dtype for p in (model.policy_parameters | model.value_parameters).values()} == {torch.float32}
    assert all(bool(p.isfinite().all()) for p in trained.values())
    assert changed(base_weights(model), base) == set()
    assert {p.dtype for p in base_weights(model).values()} == {torch.bfloat16}


def test_logprobs_are_near_those_in_float32(models: tuple[LoraModel, LoraModel]) -> None:
    """Before an update and after one, which each has made of the same batch."""
    for _ in range(2):
        difference = (taken(models[0]) - taken(models[1])).abs()
        print(f"bfloat16 against float32: mean {difference.mean():.4f}, max {difference.max():.4f} nats")
        assert 0 < difference.mean() < MEAN_TOLERANCE
        for model in models:
            update(model, two_prefix_batch(), SETTINGS)
