"""What the tokens of a batch tell each LoRA matrix B: W = sum over tokens of |delta|^2 z z^T, (r, r).

z = A x is what a token feeds B, delta the gradient at B's output. The gradient of B, sum of delta z^T, lives in the
directions of z; W says how much each of them already moves. It is the input side of K-FAC (Martens and Grosse 2015,
section 3) with each token weighted by its gradient.
"""

from functools import partial

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class TokenMoments:
    """Watches every B of one adapter during forward and backward passes."""

    def __init__(self, model: PeftModel, adapter: str) -> None:
        self._sums: dict[str, Tensor] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                watch = partial(self._watch, f"{name}.lora_B.{adapter}.weight")
                layer.lora_B[adapter].register_forward_hook(watch)

    def take(self) -> dict[str, Tensor]:
        """Name of a B -> its float32 W over all tokens since the last call."""
        sums, self._sums = self._sums, {}
        return sums

    def _watch(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._add, name, inputs[0].detach()))

    def _add(self, name: str, z: Tensor, delta: Tensor) -> None:
        z = z.float().flatten(0, -2)
        weight = delta.float().flatten(0, -2).square().sum(1, keepdim=True)
        outer = (z * weight).T @ z
        self._sums[name] = self._sums[name] + outer if name in self._sums else outer
