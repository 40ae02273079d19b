"""A linear layer under several adapters at once."""

from dataclasses import dataclass

from torch import Tensor, nn

from app.engine.embedded.adapters import Adapter


@dataclass
class LoraBatch:
    """Which rows of the running forward pass belong to which adapter. One instance, shared by all layers."""

    segments: list[tuple[int, int, Adapter]]
    """(first row, row after the last, adapter); rows in no segment run under the base model."""


class LoraLinear(nn.Module):
    """The base layer plus each segment's low-rank update, never merged: rounding would swallow small updates."""

    def __init__(self, name: str, base: nn.Linear, batch: LoraBatch):
        super().__init__()
        self.name = name
        self.base = base
        self.batch = batch

    def forward(self, x: Tensor) -> Tensor:
        """(1, N, inputs) -> (1, N, outputs); N = the rows of the pass, ordered by adapter."""
        y: Tensor = self.base(x)
        for start, end, adapter in self.batch.segments:
            update = adapter.weights.get(self.name)
            if update is not None:
                y[0, start:end].addmm_(x[0, start:end] @ update.a.T, update.b.T, alpha=update.scaling)
        return y


def wrap_linear_layers(model: nn.Module, head: nn.Module | None, batch: LoraBatch) -> dict[str, nn.Linear]:
    """Puts a LoraLinear around every linear layer except the output head; returns the layers by module name."""
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(name, layer, batch))
    return layers
