"""Centring, by hand and against plain loops."""

import math

import pytest
import torch

from learner.sao.centring import centring_loss, common_pushes, push_sums
from learner.sao.objective import dis_weights, policy_loss

BAND = (0.2, 4.0)


def test_pushes_by_hand() -> None:
    """Two openings at (1/4, 3/4), one token inside at (1/2, 1/2); f(r) A = 1, -2 and 4."""
    logprobs = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]]).log()
    pushes, mobilities = push_sums(
        logprobs, torch.tensor([0, 1, 0]), torch.tensor([1.0, -2.0, 4.0]), torch.tensor([True, True, False])
    )
    # openings: 1 (1 - 1/4, -3/4) - 2 (-1/4, 1 - 3/4) = (5/4, -5/4); inside: 4 (1/2, -1/2)
    torch.testing.assert_close(pushes, torch.tensor([[2.0, -2.0], [1.25, -1.25]]))
    # 1 - 1/4 - 1/4; twice 1 - 1/16 - 9/16
    torch.testing.assert_close(mobilities, torch.tensor([0.5, 0.75]))
    # a common push is never more than the sum, however settled the tokens are
    torch.testing.assert_close(
        common_pushes(pushes, torch.tensor([0.0, 5.0])), torch.tensor([[2.0, -2.0], [0.25, -0.25]])
    )


def random_batch(count: int = 12, vocabulary: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocabulary, (count,), generator=generator)
    taken = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    behaviour = taken + torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    opening = torch.rand(count, generator=generator) < 0.5
    return logits.requires_grad_(), ids, behaviour, advantages, opening


@pytest.mark.parametrize("centring", [0.0, 0.3, 1.0])
def test_the_gradient_against_plain_loops(centring: float) -> None:
    logits, ids, behaviour, advantages, opening = random_batch()
    count, vocabulary = logits.shape
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    weights = dis_weights(taken - behaviour, BAND) * advantages
    common = common_pushes(*push_sums(logprobs, ids, weights, opening))
    loss = policy_loss(taken, behaviour, advantages, BAND, count)
    (loss + centring_loss(logprobs, opening, common, centring, count)).backward()

    pushes, mobilities = [], []
    for t in range(count):
        pi = [math.exp(float(x)) for x in logprobs[t].detach()]
        ratio = math.exp(float(taken[t].detach()) - float(behaviour[t]))
        weight = ratio * float(advantages[t]) if 0.2 < ratio < 4.0 else 0.0
        pushes.append([weight * ((v == int(ids[t])) - pi[v]) for v in range(vocabulary)])
        mobilities.append(1 - sum(p * p for p in pi))
    for t in range(count):
        kind = [s for s in range(count) if bool(opening[s]) == bool(opening[t])]
        for v in range(vocabulary):
            share = mobilities[t] / sum(mobilities[s] for s in kind)
            expected = -(pushes[t][v] - centring * share * sum(pushes[s][v] for s in kind)) / count
            assert float(logits.grad[t, v]) == pytest.approx(expected, abs=1e-12)  # type: ignore[index]


def test_all_of_it_leaves_a_batch_no_common_push() -> None:
    logits, ids, behaviour, advantages, opening = random_batch()
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    weights = dis_weights(taken - behaviour, BAND) * advantages
    common = common_pushes(*push_sums(logprobs, ids, weights, opening))
    loss = policy_loss(taken, behaviour, advantages, BAND, len(ids)) + centring_loss(
        logprobs, opening, common, 1.0, len(ids)
    )
    loss.backward()
    assert logits.grad is not None
    for kind in (opening, ~opening):
        assert logits.grad[kind].abs().max() > 1e-3
        torch.testing.assert_close(logits.grad[kind].sum(0), torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0)


def test_settled_tokens_take_no_part() -> None:
    """One of three openings is sure of its answer: the others share what is taken out."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [40.0, 0.0]], requires_grad=True)
    logprobs = logits.log_softmax(-1)
    opening = torch.tensor([True, True, True])
    common = common_pushes(torch.tensor([[0.0, 0.0], [3.0, -3.0]]), torch.tensor([0.0, 1.0]))
    centring_loss(logprobs, opening, common, 1.0, 3).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5], [0.5, -0.5], [0.0, 0.0]]))
