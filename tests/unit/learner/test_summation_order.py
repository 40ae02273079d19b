"""What another order of adding does to the weights that one update makes: docs/operations.md, Rebuilding a version.

Other hardware, another number of threads and another micro-batch size all add up the same numbers in another order. The
last is what can be had on any machine. `pytest tests/unit/learner/test_summation_order.py -s` prints the figures.
"""

from pathlib import Path
from uuid import UUID

import pytest
import torch

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.full_model import FullModel
from learner.lora_model import LoraModel
from learner.model import LearnerModel
from learner.optimisers import build_optimisers
from learner.prepare import write_version_zero
from learner.step import run_update
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS, full_settings

LORA = {name: SETTINGS.model_copy(update={"policy_optimiser": name}) for name in ("preconditioned", "adamw")}


def policy_after(settings: LearningSettings, dtype: Dtype, budget: int, base: Path, home: Path) -> torch.Tensor:
    """All of the policy's weights after one update from version 0, in micro-batches of `budget` suffix tokens."""
    model: LearnerModel
    if settings in LORA.values():
        zero = write_version_zero("p", UUID(int=1), base, settings, home)
        model = LoraModel(base, dtype, settings, Path(zero.path))
    else:
        model = FullModel(base, dtype, settings, base)
    settings = settings.model_copy(update={"tokens_per_micro_batch": budget})
    optimisers = build_optimisers(model, settings)
    run_update(model, optimisers, two_prefix_batch(), settings, updates_done=10, shortfall=1.0)
    return torch.cat([p.detach().float().flatten() for p in model.policy_parameters.values()])


@pytest.mark.parametrize(
    ("name", "dtype", "at_most"),
    [
        ("preconditioned", "float32", 1e-6),
        ("preconditioned", "bfloat16", 1e-4),
        ("adamw", "float32", 1e-4),
        ("adamw", "bfloat16", None),
        ("full", "float32", 1e-6),
        ("full", "bfloat16", None),
    ],
)
def test_weights_after_one_update(
    name: str, dtype: Dtype, at_most: float | None, tiny_model: Path, tmp_path: Path
) -> None:
    """at_most: None: AdamW moves an entry whose gradient is all rounding by whole steps too, in either direction."""
    settings = full_settings() if name == "full" else LORA[name]
    whole, pieces = (policy_after(settings, dtype, budget, tiny_model, tmp_path) for budget in (4096, 24))
    difference = (whole - pieces).abs()
    moved = settings.policy_lr * settings.policy_steps
    print(
        f"{name}, {dtype}: max {difference.max():.1e}, root mean square {difference.square().mean().sqrt():.1e}; "
        f"the update moves an entry by about {moved:.1e}"
    )
    assert difference.max() <= (at_most or 2.2 * moved)
