"""The policy's optimiser, with numbers worked out by hand."""

import pytest
import torch
from torch import Tensor, nn

from learner.preconditioned import BETA, EPSILON, MEMORY, Preconditioned


class Moments:
    """What the next step takes, as `TokenMoments` does: once."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        sums, self.sums = self.sums, {}
        return sums


def parameter(gradient: list[list[float]]) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(len(gradient), len(gradient[0])))
    result.grad = torch.tensor(gradient)
    return result


def test_without_moments_a_step_is_the_gradient_at_one_size_and_momentum_adds_up() -> None:
    weight = parameter([[3.0, -4.0], [0.0, 0.0]])  # root mean square 2.5
    optimiser = Preconditioned([("weight", weight)], 0.1, dict)
    optimiser.step()
    first = -0.1 * (1 - BETA) * torch.tensor([[1.2, -1.6], [0.0, 0.0]])
    torch.testing.assert_close(weight.data, first)
    optimiser.step()  # the same gradient: (1 - beta) + beta (1 - beta) more in the momentum
    torch.testing.assert_close(weight.data, first * (2 + BETA))


def test_a_direction_that_many_tokens_share_is_divided_by_their_moment() -> None:
    weight = parameter([[100.0, 1.0]])
    moments = Moments()
    optimiser = Preconditioned([("weight", weight)], 1.0, moments.take)
    moments.sums = {"weight": torch.diag(torch.tensor([100.0, 1.0]))}
    optimiser.step()
    damping = EPSILON * 101 / 2
    wanted = torch.tensor([[100 / (100 + damping), 1 / (1 + damping)]])
    wanted = wanted / wanted.square().mean().sqrt()
    torch.testing.assert_close(weight.data, -(1 - BETA) * wanted)


def test_moments_are_remembered() -> None:
    weight = parameter([[1.0, 1.0]])
    moments = Moments()
    optimiser = Preconditioned([("weight", weight)], 1.0, moments.take)
    moments.sums = {"weight": torch.eye(2)}
    optimiser.step()
    moments.sums = {"weight": torch.diag(torch.tensor([6.0, 1.0])), "another": torch.eye(3)}
    optimiser.step()
    torch.testing.assert_close(optimiser.state[weight]["W"], torch.diag(torch.tensor([MEMORY + 6 * (1 - MEMORY), 1.0])))


def test_moments_of_other_backward_passes_are_forgotten() -> None:
    weight = parameter([[1.0, 1.0]])
    moments = Moments()
    optimiser = Preconditioned([("weight", weight)], 1.0, moments.take)
    moments.sums = {"weight": torch.eye(2)}
    optimiser.zero_grad()
    weight.grad = torch.ones(1, 2)
    optimiser.step()
    assert "W" not in optimiser.state[weight]


@pytest.mark.parametrize("moment", [None, torch.zeros(2, 2)])
def test_a_gradient_of_zeros_moves_nothing(moment: torch.Tensor | None) -> None:
    weight = parameter([[0.0, 0.0]])
    moments = Moments()
    optimiser = Preconditioned([("weight", weight)], 1.0, moments.take)
    if moment is not None:
        moments.sums = {"weight": moment}
    optimiser.step()
    assert torch.equal(weight.data, torch.zeros(1, 2))


def test_its_state_survives_saving() -> None:
    weights = [parameter([[1.0, 2.0]]) for _ in range(2)]
    moments = [Moments(), Moments()]
    optimisers = [Preconditioned([("weight", w)], 0.1, m.take) for w, m in zip(weights, moments, strict=True)]
    moments[0].sums = {"weight": torch.eye(2)}
    optimisers[0].step()
    weights[1].data.copy_(weights[0].data)
    optimisers[1].load_state_dict(optimisers[0].state_dict())
    for optimiser, taken in zip(optimisers, moments, strict=True):
        taken.sums = {"weight": 2 * torch.eye(2)}
        optimiser.step()
    assert torch.equal(weights[0].data, weights[1].data)
