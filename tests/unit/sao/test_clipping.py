"""PPO's clip and no clip, beside DIS: numbers worked out by hand, the definitions themselves, micro-batches."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.sao.clipping import Clip, clip_accepted, clip_sides, clip_weights, clipped_policy_loss
from learner.sao.health import masked_share
from learner.sao.objective import dis_accepted, dis_weights, policy_loss
from tests.unit.sao import reference
from tests.unit.sao.reference import Token
from tests.unit.sao.test_against_reference import column, repeatable, rollouts

BAND = (0.2, 4.0)
CLIPS: tuple[Clip, ...] = get_args(Clip)

RATIOS = [0.1, 0.1, 1.0, 1.0, 5.0, 5.0]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
WEIGHTS: dict[Clip, list[float]] = {
    "dis": [0.0, 0.0, 1.0, 1.0, 0.0, 0.0],
    # below the band only the token that is pushed down is clipped, above it only the one that is pushed up
    "ppo": [0.1, 0.0, 1.0, 1.0, 0.0, 5.0],
    "none": [0.1, 0.1, 1.0, 1.0, 5.0, 5.0],
}


@pytest.mark.parametrize("clip", CLIPS)
def test_weights_by_hand(clip: Clip) -> None:
    log_ratio, advantages = torch.tensor(RATIOS).log(), torch.tensor(ADVANTAGES)
    weights = clip_weights(log_ratio, advantages, BAND, clip)
    torch.testing.assert_close(weights, torch.tensor(WEIGHTS[clip]))
    assert clip_accepted(log_ratio, advantages, BAND, clip).tolist() == [w > 0 for w in WEIGHTS[clip]]


@pytest.mark.parametrize(("clip", "low", "high"), [("dis", 2 / 6, 2 / 6), ("ppo", 1 / 6, 1 / 6), ("none", 0.0, 0.0)])
def test_masked_shares_by_hand(clip: Clip, low: float, high: float) -> None:
    shares = masked_share(torch.tensor(RATIOS).log(), torch.tensor(ADVANTAGES), BAND, clip)
    assert shares == (pytest.approx(low), pytest.approx(high))


def test_ppo_loss_gradient_by_hand() -> None:
    """r = 2, 5, 5, 0.1; A = 1, 1, -2, -3; N = 8: d loss / d log pi = -w A / N = -2/8, 0, 10/8, 0."""
    behaviour = torch.tensor([0.25, 0.1, 0.1, 0.5]).log()
    logprobs = torch.tensor([0.5, 0.5, 0.5, 0.05]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -2.0, -3.0])
    clipped_policy_loss(logprobs, behaviour, advantages, BAND, 8, "ppo").backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.25, 0.0, 1.25, 0.0]))


def test_edges_lie_outside_for_dis_and_inside_for_ppo() -> None:
    edges, advantages = torch.tensor([0.2, 4.0], dtype=torch.float64).log(), torch.tensor([-1.0, 1.0]).double()
    assert clip_weights(edges, advantages, BAND, "dis").tolist() == [0.0, 0.0]
    assert clip_weights(edges, advantages, BAND, "ppo").tolist() == pytest.approx([0.2, 4.0])


def surrogate(clip: Clip, ratio: float, advantage: float) -> float:
    """What each maximises, as a function of the ratio, written down once more."""
    if clip == "dis":
        return ratio * advantage if 0.2 < ratio < 4.0 else 0.0
    return reference.ppo_surrogate(ratio, advantage, *BAND) if clip == "ppo" else ratio * advantage


@pytest.mark.parametrize("clip", CLIPS)
@repeatable
@given(rollouts, st.integers(0, 2**32))
def test_gradients_are_those_of_the_definitions(clip: Clip, tokens: list[Token], seed: int) -> None:
    """d loss / d log pi_t = -(1/N) d surrogate / d log pi_t, token by token, by central differences in float64."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = column(tokens, "logprob").double().requires_grad_()
    behaviour = column(tokens, "behaviour").double()
    advantages = torch.randn(len(behaviour), generator=generator, dtype=torch.float64)
    clipped_policy_loss(logprobs, behaviour, advantages, BAND, 100, clip).backward()
    assert logprobs.grad is not None
    for t, (at, b, a) in enumerate(zip(logprobs.tolist(), behaviour.tolist(), advantages.tolist(), strict=True)):
        if min(abs(at - b - math.log(edge)) for edge in BAND) < 1e-5:
            continue  # no derivative there

        def of_token(logprob: float, b: float = b, a: float = a) -> float:
            return surrogate(clip, math.exp(logprob - b), a)

        assert logprobs.grad[t].item() == pytest.approx(-reference.slope(of_token, at) / 100, abs=1e-7, rel=1e-6)


@repeatable
@given(rollouts)
def test_dis_is_the_objective_of_sao_bit_for_bit(tokens: list[Token]) -> None:
    logprobs, behaviour, advantages = (column(tokens, name) for name in ("logprob", "behaviour", "value"))
    ours = logprobs.clone().requires_grad_()
    theirs = logprobs.clone().requires_grad_()
    loss = clipped_policy_loss(ours, behaviour, advantages, BAND, 50, "dis")
    expected = policy_loss(theirs, behaviour, advantages, BAND, 50)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    log_ratio = logprobs - behaviour
    assert torch.equal(clip_weights(log_ratio, advantages, BAND, "dis"), dis_weights(log_ratio, BAND))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("size", [1, 2, 5, 7, 23])
def test_gradients_do_not_depend_on_the_micro_batch(clip: Clip, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    n, vocabulary = 23, 13
    logits = torch.randn(n, vocabulary, generator=generator)
    actions = torch.randint(vocabulary, (n, 1), generator=generator)
    behaviour = logits.log_softmax(-1).gather(-1, actions).squeeze(-1) + torch.randn(n, generator=generator)
    advantages = torch.randn(n, generator=generator)

    def gradient(size: int) -> torch.Tensor:
        x = logits.clone().requires_grad_()
        for rows in torch.arange(n).split(size):
            chosen = x[rows].log_softmax(-1).gather(-1, actions[rows]).squeeze(-1)
            clipped_policy_loss(chosen, behaviour[rows], advantages[rows], BAND, n, clip).backward()
        assert x.grad is not None
        return x.grad

    assert gradient(n).abs().max() > 0
    torch.testing.assert_close(gradient(size), gradient(n), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="whole batch"):
        clipped_policy_loss(behaviour, behaviour, advantages, BAND, 0, clip)


def test_no_nan_where_ppo_clips_what_overflows() -> None:
    """e^800 is infinite: the clipped token trains nothing, and log pi = -inf on the other side neither."""
    logprobs = torch.tensor([-0.1, -math.inf, -0.2], requires_grad=True)
    behaviour = torch.tensor([-800.0, -0.1, -0.2])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    assert clip_weights(logprobs - behaviour, advantages, BAND, "ppo").tolist() == [0.0, 0.0, 1.0]
    loss = clipped_policy_loss(logprobs, behaviour, advantages, BAND, 4, "ppo")
    assert loss.item() == pytest.approx(0.05)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, -0.25]


@pytest.mark.parametrize("clip", ["ppo", "none"])
def test_an_infinite_ratio_that_nothing_bounds_is_not_hidden(clip: Clip) -> None:
    weights = clip_weights(torch.tensor([800.0]), torch.tensor([-1.0]), BAND, clip)
    assert weights.tolist() == [math.inf]


def test_an_impossible_token_adds_nothing_even_without_a_clip() -> None:
    logprobs = torch.tensor([-math.inf, -0.5], requires_grad=True)
    loss = clipped_policy_loss(logprobs, torch.tensor([-0.1, -0.5]), torch.tensor([-1.0, 1.0]), BAND, 2, "none")
    assert loss.item() == pytest.approx(0.25)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5]


def test_a_ratio_that_is_no_number_is_rejected_by_dis_and_shown_by_the_others() -> None:
    log_ratio, advantages = torch.tensor([math.nan]), torch.tensor([1.0])
    assert not dis_accepted(log_ratio, BAND).item()
    assert clip_weights(log_ratio, advantages, BAND, "dis").tolist() == [0.0]
    for clip in ("ppo", "none"):
        assert clip_weights(log_ratio, advantages, BAND, clip).isnan().all()
    low, high = clip_sides(log_ratio, advantages, BAND, "none")
    assert not low.item()
    assert not high.item()
