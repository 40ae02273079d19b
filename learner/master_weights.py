"""float32 master copies of weights that multiply in a smaller dtype (Micikevicius et al. 2018, section 3.1).

A step of 1e-6 is below bfloat16's resolution of any weight above 3e-4, so it must be added up in float32; the forward
pass must see the weights as an engine serves them, rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MasterWeights:
    """Of the parameters of `module` that require a gradient. In a float32 module the masters are those themselves.

    What a backward pass leaves on a rounded weight is added to its master's `.grad` in float32 at once, so that
    gradients of many micro-batches are not summed up in the smaller dtype.
    """

    def __init__(self, module: nn.Module) -> None:
        self._rounded = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, weight in self._rounded.items():
            if weight.dtype == torch.float32:
                self.parameters[name] = weight
                continue
            master = nn.Parameter(weight.detach().float())
            weight.register_post_accumulate_grad_hook(_adding_to(master))
            self.parameters[name] = master

    @torch.no_grad()
    def round(self) -> dict[str, nn.Parameter]:
        """Brings the module's weights to what the masters are now, rounded to their dtype; returns them."""
        for name, weight in self._rounded.items():
            if weight is not self.parameters[name]:
                weight.copy_(self.parameters[name])
        return self._rounded


def _adding_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return add
