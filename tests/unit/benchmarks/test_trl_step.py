"""TRL's contestant is what its `train()` would run: checkpointed if it says so, adapters multiplying in bfloat16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.policy_step import batch
from benchmarks.trl_step import padded, prepared_trainer, trl_step
from learner.trajectory import Trajectory
from tests.contract.tiny_model import VOCABULARY, build_base_model

pytest.importorskip("trl", reason="make bench installs it")


def tiny_batch() -> list[Trajectory]:
    trajectories = batch(rollouts=2, prompt=12, turns=[(4, 3), (2, 0)])
    return [replace(t, token_ids=t.token_ids % VOCABULARY) for t in trajectories]


def lora_outputs(model: torch.nn.Module) -> set[torch.dtype]:
    """Dtypes in which the adapters' first matrices multiply from now on; filled by forward passes."""
    dtypes: set[torch.dtype] = set()
    layers = [layer for name, layer in model.named_modules() if name.endswith("lora_A.default")]
    assert layers
    for layer in layers:
        assert layer.weight.dtype == torch.float32
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    return dtypes


@pytest.mark.parametrize(("dtype", "multiplied"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_the_models_own_forward_autocasts(tmp_path: Path, dtype: str, multiplied: torch.dtype) -> None:
    """Without TRL's `compute_loss`, which has an autocast of its own around this call."""
    trainer = prepared_trainer(2, build_base_model(tmp_path), dtype, checkpointing=False)
    dtypes = lora_outputs(trainer.model_wrapped)
    trainer.model_wrapped(input_ids=torch.arange(8).unsqueeze(0))
    assert dtypes == {multiplied}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_runs_again_in_the_backward_pass_if_checkpointed(tmp_path: Path, checkpointing: bool) -> None:
    trainer = prepared_trainer(2, build_base_model(tmp_path), "bfloat16", checkpointing=checkpointing)
    layer = trainer.model.get_base_model().model.layers[0]
    passes: list[int] = []
    # within the layer, whose own hooks stay outside of the checkpoint, and before what the recomputation may leave out
    layer.mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    dtypes = lora_outputs(trainer.model_wrapped)
    loss = trainer.compute_loss(trainer.model_wrapped, padded(tiny_batch()))
    assert len(passes) == 1
    trainer.accelerator.backward(loss)
    assert len(passes) == 1 + checkpointing
    assert dtypes == {torch.bfloat16}


def test_a_step_moves_the_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def keep(*arguments: Any, **options: Any) -> Any:
        made.append(prepared_trainer(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("benchmarks.trl_step.prepared_trainer", keep)
    step = trl_step(tiny_batch(), build_base_model(tmp_path), "float32", checkpointing=True)
    weights = [p for name, p in made[0].model.named_parameters() if "lora_B" in name]
    assert all((weight == 0).all() for weight in weights)
    assert step() > 0
    assert all((weight != 0).any() for weight in weights)
