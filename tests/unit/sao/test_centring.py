"""Centring, by hand and against plain loops."""

import math

import pytest
import torch

from learner.sao.centring import PushEvidence, PushSums, centring_loss, chance, common_pushes, push_sums, total
from learner.sao.objective import dis_weights, policy_loss

BAND = (0.2, 4.0)


def test_pushes_by_hand() -> None:
    """Two openings at (1/4, 3/4), one token inside at (1/2, 1/2); f(r) A = 1, -2 and 4."""
    logprobs = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]]).log()
    sums = push_sums(
        logprobs, torch.tensor([0, 1, 0]), torch.tensor([1.0, -2.0, 4.0]), torch.tensor([True, True, False])
    )
    # openings: 1 (1 - 1/4, -3/4) - 2 (-1/4, 1 - 3/4) = (3/4, -3/4) + (1/2, -1/2); inside: 4 (1/2, -1/2)
    torch.testing.assert_close(sums.pushes, torch.tensor([[2.0, -2.0], [1.25, -1.25]]))
    torch.testing.assert_close(sums.squares, torch.tensor([8.0, 9 / 8 + 1 / 2]))
    # 1 - 1/4 - 1/4; twice 1 - 1/16 - 9/16
    torch.testing.assert_close(sums.mobilities, torch.tensor([0.5, 0.75]))
    assert sums.tokens.tolist() == [1, 2]


def of_kinds(inside: list[list[float]], opening: list[list[float]]) -> PushSums:
    """Sums of these pushes, of tokens whose mobility is 1."""
    kinds = [torch.tensor(pushes).reshape(-1, 2) for pushes in (inside, opening)]
    return PushSums(
        torch.stack([kind.sum(0) for kind in kinds]),
        torch.stack([kind.square().sum() for kind in kinds]),
        torch.tensor([float(len(kind)) for kind in kinds]),
        torch.tensor([len(kind) for kind in kinds]),
    )


def test_what_chance_would_make_by_hand() -> None:
    # (1, -1) and (0, 0): their mean (1/2, -1/2) has the two at a squared distance of 1/2 each, so chance is
    # 2 (1/2 + 1/2) / (2 - 1) = 2; three alike leave chance nothing
    torch.testing.assert_close(
        chance(of_kinds([[1, -1], [0, 0]], [[1, -1], [1, -1], [1, -1]])), torch.tensor([2.0, 0.0])
    )
    # distances of (5/2, -5/2) make 2 (25/2 + 25/2); all of a single token may be chance: 25 + 25
    torch.testing.assert_close(chance(of_kinds([[3, -3], [-2, 2]], [[5, -5]])), torch.tensor([50.0, 50.0]))
    assert chance(of_kinds([], [])).tolist() == [0.0, 0.0]


def test_evidence_of_several_batches_by_hand() -> None:
    evidence = PushEvidence()
    evidence.add(of_kinds([[2, -2], [1, -1]], [[5, -5]]))
    # (3, -3) is 18; two distances of (1/2, -1/2) make chance 2 (1/2 + 1/2) = 2; a single token is all chance
    torch.testing.assert_close(evidence.noise_share(), torch.tensor([4 * 2 / 18, 1.0]))
    evidence.add(of_kinds([[2, -2], [1, -1]], [[-20, 20], [-20, 20]]))
    # the same again: 1.8 (3, -3) is 58.32, chance 3.28; openings: 0.8 (5, -5) + (-40, 40) is 2592, chance 0.64 * 50
    assert evidence.pushes is not None
    torch.testing.assert_close(evidence.pushes, torch.tensor([[5.4, -5.4], [-36.0, 36.0]]))
    torch.testing.assert_close(evidence.noise_share(), torch.tensor([4 * 3.28 / 58.32, 4 * 32 / 2592]))
    evidence.add(of_kinds([[-4, 4], [-1, 1]], []))
    # 0.8 (5.4, -5.4) + (-5, 5) = (-0.68, 0.68): far within chance's 0.64 * 3.28 + 18; nothing opens: no change
    torch.testing.assert_close(evidence.noise_share(), torch.tensor([1.0, 4 * 32 / 2592]))


def test_no_push_is_no_evidence() -> None:
    evidence = PushEvidence()
    evidence.add(of_kinds([], []))
    assert evidence.noise_share().tolist() == [1.0, 1.0]


def test_evidence_goes_on_from_its_state() -> None:
    one, other = PushEvidence(), PushEvidence()
    other.load_state_dict(one.state_dict())  # of no batch yet
    sums = of_kinds([[2, -2], [1, -1]], [[1, -1], [1, 0]])
    one.add(sums)
    other.load_state_dict(one.state_dict())
    one.add(sums)
    other.add(sums)
    assert torch.equal(one.noise_share(), other.noise_share())


def test_common_pushes_are_shares_of_the_whole_batch_by_mobility() -> None:
    sums = total([of_kinds([[1, -1]], [[2, -2]]), of_kinds([[0, 0]], [[1, -1]])])
    assert sums.tokens.tolist() == [2, 2]
    torch.testing.assert_close(common_pushes(sums, torch.ones(2)), torch.tensor([[0.5, -0.5], [1.5, -1.5]]))
    shares = torch.tensor([0.5, 1 / 3])
    torch.testing.assert_close(common_pushes(sums, shares), torch.tensor([[0.25, -0.25], [0.5, -0.5]]))
    # never more than the sum, however settled the tokens are
    settled = sums._replace(mobilities=torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(common_pushes(settled, torch.ones(2)), torch.tensor([[1.0, -1.0], [3.0, -3.0]]))


def random_batch(count: int = 12, vocabulary: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocabulary, (count,), generator=generator)
    taken = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    behaviour = taken + torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    opening = torch.rand(count, generator=generator) < 0.5
    return logits.requires_grad_(), ids, behaviour, advantages, opening


def reference_chance(pushes: list[list[float]]) -> float:
    """The variance of a sum is n times that of its terms, estimated from their distances to the mean."""
    n, width = len(pushes), len(pushes[0])
    means = [sum(push[v] for push in pushes) / n for v in range(width)]
    return n * sum((push[v] - means[v]) ** 2 for push in pushes for v in range(width)) / (n - 1)


@pytest.mark.parametrize("centring", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("noise_share", [1.0, 0.4])
def test_the_gradient_against_plain_loops(centring: float, noise_share: float) -> None:
    logits, ids, behaviour, advantages, opening = random_batch()
    count, vocabulary = logits.shape
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    weights = dis_weights(taken - behaviour, BAND) * advantages
    sums = push_sums(logprobs, ids, weights, opening)
    common = common_pushes(sums, torch.full((2,), noise_share, dtype=torch.float64))
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
            expected = -(pushes[t][v] - centring * noise_share * share * sum(pushes[s][v] for s in kind)) / count
            assert float(logits.grad[t, v]) == pytest.approx(expected, abs=1e-12)  # type: ignore[index]
    for at, opens in enumerate((False, True)):
        kind = [s for s in range(count) if bool(opening[s]) == opens]
        assert float(chance(sums)[at]) == pytest.approx(reference_chance([pushes[s] for s in kind]))


def test_all_of_it_leaves_a_batch_no_common_push() -> None:
    logits, ids, behaviour, advantages, opening = random_batch()
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    weights = dis_weights(taken - behaviour, BAND) * advantages
    common = common_pushes(push_sums(logprobs, ids, weights, opening), torch.ones(2, dtype=torch.float64))
    loss = policy_loss(taken, behaviour, advantages, BAND, len(ids)) + centring_loss(
        logprobs, opening, common, 1.0, len(ids)
    )
    loss.backward()
    assert logits.grad is not None
    for kind in (opening, ~opening):
        assert logits.grad[kind].abs().max() > 1e-3
        torch.testing.assert_close(logits.grad[kind].sum(0), torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0)


def test_what_no_chance_would_make_is_left() -> None:
    """Two rewarded answers of one kind and two of each of two kinds, from a uniform policy."""
    logits = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    opening = torch.tensor([True, True, False, False, False, False])
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    weights = torch.ones(6, dtype=torch.float64)
    sums = push_sums(logprobs, ids, weights, opening)
    evidence = PushEvidence()
    evidence.add(sums)
    common = common_pushes(sums, evidence.noise_share())
    taken = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    (policy_loss(taken, taken.detach(), weights, BAND, 6) + centring_loss(logprobs, opening, common, 1.0, 6)).backward()
    assert logits.grad is not None
    push = -6 * logits.grad
    # openings agree: all is left
    torch.testing.assert_close(push[opening], torch.tensor([[2 / 3, -1 / 3, -1 / 3]] * 2, dtype=torch.float64))
    # inside the sum is (2/3, 2/3, -4/3), of square 8/3; four distances of (1/2, -1/2, 0) make chance
    # 4 (4 / 2) / 3, four times which is more: all
    torch.testing.assert_close(push[~opening].sum(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)


def test_settled_tokens_take_no_part() -> None:
    """One of three openings is sure of its answer: the others share what is taken out."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [40.0, 0.0]], requires_grad=True)
    logprobs = logits.log_softmax(-1)
    opening = torch.tensor([True, True, True])
    common = torch.tensor([[0.0, 0.0], [3.0, -3.0]])
    centring_loss(logprobs, opening, common, 1.0, 3).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5], [0.5, -0.5], [0.0, 0.0]]))
