"""The learner's state after one update, all of the same update: policy, value model, both optimisers, the evidence of
the common pushes, the RNG, and the returns that a running mean is taken of."""

import json
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from app.policies.files import delete_directory, modified_ns
from learner.adapters import without_adapter
from learner.artifacts import TEMPORARY_PREFIX
from learner.model import LearnerModel
from learner.optimisers import Optimisers

POLICY = "policy.safetensors"
VALUE = "value.safetensors"
TRAINING = "training.pt"
STATE = "state.json"


DAMAGED = (
    AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip
"""What torch.load raises on a file that is cut short or holds something else."""


class CheckpointMismatch(RuntimeError):
    """The parts of a checkpoint do not belong together, or not to this model."""


@dataclass(frozen=True)
class Progress:
    """What the learner has gone through: updates, and of the newest rollouts trained the returns and the residuals,
    oldest first."""

    updates_done: int
    recent_returns: tuple[float, ...]
    recent_residuals: tuple[float, ...]


def save_checkpoint(
    directory: Path,
    model: LearnerModel,
    optimisers: Optimisers,
    *,
    update_id: UUID,
    updates_done: int,
    recent_returns: Iterable[float] = (),
    recent_residuals: Iterable[float] = (),
) -> None:
    """Writes the state after `update_id` into `directory`; `updates_done`, `recent_returns` and `recent_residuals`
    contain it. Every file names the update."""
    metadata = {"update_id": str(update_id)}
    for parameters, name in ((_policy(model), POLICY), (_value(model), VALUE)):
        save_file({n: p.detach().contiguous() for n, p in parameters.items()}, directory / name, metadata)
    torch.save(
        {
            **metadata,
            "policy_optimiser": optimisers.policy.state_dict() | {"kind": type(optimisers.policy).__name__},
            "value_optimiser": optimisers.value.state_dict(),
            "push_evidence": optimisers.pushes.state_dict(),
            "rng": torch.get_rng_state(),
        },
        directory / TRAINING,
    )
    # JSON keeps every bit of a float
    state = {
        **metadata,
        "updates_done": updates_done,
        "recent_returns": list(recent_returns),
        "recent_residuals": list(recent_residuals),
    }
    (directory / STATE).write_text(json.dumps(state, indent=2))


def load_checkpoint(directory: Path, model: LearnerModel, optimisers: Optimisers, *, update_id: UUID) -> Progress:
    """Restores the state after `update_id` into a model and optimisers of the same settings; returns the rest of it.

    Learning rates and betas stay those of `optimisers`: a policy's settings may have changed since. If they chose
    another optimiser, that one starts without moments. A checkpoint from before returns, residuals or the pushes'
    evidence were kept has none.

    Raises:
        CheckpointMismatch: a file is missing or damaged, belongs to another update, or does not fit the model. Nothing
            has been changed then.
    """
    absent = [name for name in (POLICY, VALUE, TRAINING, STATE) if not (directory / name).is_file()]
    if absent:
        raise CheckpointMismatch(f"{directory} is no complete checkpoint: {', '.join(absent)} missing")
    state = json.loads((directory / STATE).read_text())
    try:
        training = torch.load(directory / TRAINING, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        # not torch's own words: they advise to load the file without care
        raise CheckpointMismatch(f"{directory / TRAINING} cannot be read ({type(error).__name__})") from error
    policy, policy_id = _read(directory / POLICY)
    value, value_id = _read(directory / VALUE)
    ids = {STATE: state["update_id"], TRAINING: training["update_id"], POLICY: policy_id, VALUE: value_id}
    if set(ids.values()) != {str(update_id)}:
        raise CheckpointMismatch(f"{directory} should hold update {update_id} throughout, but holds {ids}")
    _check_fit(directory / POLICY, policy, _policy(model))
    _check_fit(directory / VALUE, value, _value(model))
    for optimiser, name in ((optimisers.policy, "policy_optimiser"), (optimisers.value, "value_optimiser")):
        if _names(training[name]) != _names(optimiser.state_dict()):
            raise CheckpointMismatch(f"{directory / TRAINING}: the {name} is of other parameters")

    _copy(policy, _policy(model))
    _copy(value, _value(model))
    if training["policy_optimiser"].get("kind", "AdamW") == type(optimisers.policy).__name__:
        _load_moments(optimisers.policy, training["policy_optimiser"])
    _load_moments(optimisers.value, training["value_optimiser"])
    if "push_evidence" in training:
        optimisers.pushes.load_state_dict(training["push_evidence"])
    torch.set_rng_state(training["rng"])
    return Progress(
        state["updates_done"], tuple(state.get("recent_returns", ())), tuple(state.get("recent_residuals", ()))
    )


def keep_newest(checkpoints: Path, current: Path, count: int = 3) -> list[Path]:
    """Deletes all but the newest `count` checkpoints, `current` always among them; returns the deleted ones."""
    others = [p for p in checkpoints.iterdir() if p.name != current.name and not p.name.startswith(TEMPORARY_PREFIX)]
    written = {path: at for path in others if (at := modified_ns(path / STATE)) is not None}
    deleted = sorted(written, key=lambda path: written[path], reverse=True)[count - 1 :]
    for path in deleted:
        delete_directory(path)
    return deleted


def _policy(model: LearnerModel) -> dict[str, nn.Parameter]:
    """An adapter's parameters are named as in PEFT's files, without the adapter's own name."""
    return {without_adapter(name, "policy"): parameter for name, parameter in model.policy_parameters.items()}


def _value(model: LearnerModel) -> dict[str, nn.Parameter]:
    return {without_adapter(name, "value"): parameter for name, parameter in model.value_parameters.items()}


@torch.no_grad()
def _copy(saved: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])


def _read(path: Path) -> tuple[dict[str, Tensor], str | None]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, (file.metadata() or {}).get("update_id")


def _check_fit(path: Path, saved: dict[str, Tensor], expected: dict[str, nn.Parameter]) -> None:
    if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in expected.items()}:
        raise CheckpointMismatch(f"{path} is of another model, or of other settings (rank)")


def _names(state: dict[str, Any]) -> list[list[str]]:
    return [group["param_names"] for group in state["param_groups"]]


def _load_moments(optimiser: Optimizer, saved: dict[str, Any]) -> None:
    optimiser.load_state_dict({"state": saved["state"], "param_groups": optimiser.state_dict()["param_groups"]})
