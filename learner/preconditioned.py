"""The policy's optimiser: momentum over steps that keep the gradient's direction within each matrix.

AdamW divides every entry by its own scale, which moves all prompts alike where the gradient tells them apart
(docs/decisions/0010). Here each matrix has one scale, and a LoRA matrix B is preconditioned by what it multiplies:

    g <- dB (W + EPSILON tr(W) / r I)^-1        u = g / rms(g)        m <- beta m + (1 - beta) u        p <- p - lr m

W is an exponential mean of `learner.token_moments`. An A has no W. The learning rate is the root mean square that one
step changes an entry by, as it is for AdamW while gradients agree.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BETA = 0.8
"""Momentum: five steps. More than that still pushes when the gradient has long turned, since samples lag behind."""
MEMORY = 0.8
"""Of W, per step."""
EPSILON = 0.01
"""Damping, relative to W's mean eigenvalue."""
TINY = 1e-20
"""Keeps a gradient of zeros (an A while its B is zero) at zero."""


class Preconditioned(Optimizer):
    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        take_moments: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """take_moments: name of a B -> (r, r), its W over the backward passes since it was last called."""
        super().__init__(list(parameters), {"lr": lr})
        self._take_moments = take_moments

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._take_moments()  # what went backward before was not for the next step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient."""
        assert closure is None
        moments = self._take_moments()
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], moments.get(name), group["lr"])

    def _step(self, parameter: nn.Parameter, state: dict[str, Any], moment: Tensor | None, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if moment is not None:
            state["W"] = torch.lerp(moment, state["W"], MEMORY) if "W" in state else moment.clone()
        if "W" in state:
            w = state["W"]
            damping = EPSILON * w.trace() / len(w) + TINY
            gradient = torch.linalg.solve(w + damping * torch.eye(len(w), device=w.device), gradient, left=False)
        direction = gradient / (gradient.square().mean().sqrt() + TINY)
        momentum = state.get("momentum", torch.zeros_like(parameter))
        state["momentum"] = torch.lerp(direction, momentum, BETA)
        parameter.sub_(state["momentum"], alpha=lr)
