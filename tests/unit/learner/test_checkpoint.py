"""A checkpoint restores everything, of one update, or refuses."""

import json
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.checkpoint import CheckpointMismatch, Progress, keep_newest, load_checkpoint, save_checkpoint
from learner.lora_model import LoraModel
from learner.optimisers import Optimisers, build_optimisers
from learner.prepare import write_version_zero
from learner.step import run_update
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS

FIRST, SECOND = UUID(int=11), UUID(int=12)
RETURNS = (1 / 3, 0.1 + 0.2, -1e-17, 1e300)
RESIDUALS = (-1 / 3, 0.1 + 0.7)
"""Floats of which no decimal keeps every bit but the shortest that reads back."""


def weights(model: LoraModel) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in (model.policy_parameters | model.value_parameters).items()}


def reloaded(tiny_model: Path, tmp_path: Path, settings: LearningSettings = SETTINGS) -> tuple[LoraModel, Optimisers]:
    zero = write_version_zero("p", UUID(int=settings.lora_rank), tiny_model, settings, tmp_path)
    model = LoraModel(tiny_model, "float32", settings, Path(zero.path))
    return model, build_optimisers(model, settings)


@pytest.fixture
def trained(fresh_model: LoraModel, tmp_path: Path) -> tuple[LoraModel, Optimisers, Path]:
    optimisers = build_optimisers(fresh_model, SETTINGS)
    run_update(fresh_model, optimisers, two_prefix_batch(), SETTINGS, updates_done=5, shortfall=1.0)
    directory = tmp_path / "first"
    directory.mkdir()
    save_checkpoint(
        directory,
        fresh_model,
        optimisers,
        update_id=FIRST,
        updates_done=6,
        recent_returns=deque(RETURNS),
        recent_residuals=RESIDUALS,
    )
    return fresh_model, optimisers, directory


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    model, optimisers, directory = trained
    rng = torch.get_rng_state()
    torch.manual_seed(99)
    other, other_optimisers = reloaded(tiny_model, tmp_path)
    assert load_checkpoint(directory, other, other_optimisers, update_id=FIRST) == Progress(6, RETURNS, RESIDUALS)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, weight in weights(other).items():
        assert torch.equal(weight, weights(model)[name]), name
    assert optimisers.pushes.pushes is not None
    assert other_optimisers.pushes.pushes is not None
    assert torch.equal(optimisers.pushes.pushes, other_optimisers.pushes.pushes)
    assert torch.equal(optimisers.pushes.noise_share(), other_optimisers.pushes.noise_share())
    run_update(model, optimisers, two_prefix_batch(1), SETTINGS, updates_done=6, shortfall=1.0)
    run_update(other, other_optimisers, two_prefix_batch(1), SETTINGS, updates_done=6, shortfall=1.0)
    for name, weight in weights(other).items():
        assert torch.equal(weight, weights(model)[name]), name


def test_a_checkpoint_is_read_to_the_cpu(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written on an accelerator, it must be read where there is none."""
    read, where = torch.load, []

    def spying(*args: Any, **kwargs: Any) -> Any:
        where.append(kwargs.get("map_location"))
        return read(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spying)
    load_checkpoint(trained[2], *reloaded(tiny_model, tmp_path), update_id=FIRST)
    assert where == ["cpu"]


def test_a_checkpoint_from_before_returns_and_residuals_were_kept_has_none(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    path = trained[2] / "state.json"
    state = json.loads(path.read_text())
    del state["recent_returns"], state["recent_residuals"]
    path.write_text(json.dumps(state))
    assert load_checkpoint(trained[2], *reloaded(tiny_model, tmp_path), update_id=FIRST) == Progress(6, (), ())


def test_a_checkpoint_from_before_evidence_was_kept_has_none(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    path = trained[2] / "training.pt"
    training = torch.load(path)
    del training["push_evidence"]
    torch.save(training, path)
    other, optimisers = reloaded(tiny_model, tmp_path)
    load_checkpoint(trained[2], other, optimisers, update_id=FIRST)
    assert optimisers.pushes.pushes is None


def test_changed_learning_rates_survive_the_load(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    other, optimisers = reloaded(tiny_model, tmp_path, SETTINGS.model_copy(update={"policy_lr": 1e-3}))
    load_checkpoint(trained[2], other, optimisers, update_id=FIRST)
    assert optimisers.policy.param_groups[0]["lr"] == 1e-3
    assert len(optimisers.policy.state) == len(other.policy_parameters)


def test_another_optimiser_starts_without_moments(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    chosen = SETTINGS.model_copy(update={"policy_optimiser": "adamw"})
    other, optimisers = reloaded(tiny_model, tmp_path, chosen)
    load_checkpoint(trained[2], other, optimisers, update_id=FIRST)
    assert len(optimisers.policy.state) == 0
    assert len(optimisers.value.state) == len(other.value_parameters)
    run_update(other, optimisers, two_prefix_batch(1), chosen, updates_done=6, shortfall=1.0)


@pytest.mark.parametrize("part", ["policy.safetensors", "value.safetensors", "training.pt", "state.json"])
@pytest.mark.parametrize("fault", ["of another update", "missing"])
def test_mixed_or_incomplete_checkpoints_are_refused(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path, part: str, fault: str
) -> None:
    model, optimisers, directory = trained
    second = tmp_path / "second"
    second.mkdir()
    run_update(model, optimisers, two_prefix_batch(1), SETTINGS, updates_done=6, shortfall=1.0)
    save_checkpoint(second, model, optimisers, update_id=SECOND, updates_done=7)
    if fault == "missing":
        (directory / part).unlink()
    else:
        shutil.copy(second / part, directory / part)
    other, other_optimisers = reloaded(tiny_model, tmp_path)
    before = weights(other)
    with pytest.raises(CheckpointMismatch, match="missing" if fault == "missing" else "throughout"):
        load_checkpoint(directory, other, other_optimisers, update_id=FIRST)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(other).items())


def test_a_checkpoint_of_other_settings_is_refused(
    trained: tuple[LoraModel, Optimisers, Path], tiny_model: Path, tmp_path: Path
) -> None:
    other, optimisers = reloaded(tiny_model, tmp_path, LearningSettings(lora_rank=8, value_rank=4))
    with pytest.raises(CheckpointMismatch, match="other settings"):
        load_checkpoint(trained[2], other, optimisers, update_id=FIRST)


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        directory = tmp_path / f"c{number}"
        directory.mkdir()
        (directory / "state.json").write_text(json.dumps({"updates_done": number}))
        os.utime(directory / "state.json", (1_000 + number, 1_000 + number))
    (tmp_path / ".tmp-being-written").mkdir()
    (tmp_path / ".tmp-being-written" / "state.json").write_text("{}")
    (tmp_path / "not-whole").mkdir()
    assert {p.name for p in keep_newest(tmp_path, tmp_path / "c1")} == {"c0", "c2"}
    assert {p.name for p in tmp_path.iterdir()} == {"c1", "c3", "c4", ".tmp-being-written", "not-whole"}
