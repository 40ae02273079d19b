"""What tests of one update share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.step import UpdateResult, run_update
from learner.trajectory import Trajectory


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
