"""The mistakes that others made (those that touch these functions), each with a test named after it."""

import math

import numpy as np
import pytest
import torch

from app.rollouts.states import SkipReason
from learner.batch import build_trajectories
from learner.sao.advantages import gae, policy_lambda, whiten
from learner.sao.anchor import forward_kl
from learner.sao.objective import dis_weights, policy_loss
from learner.sao.value import explained_variance, lambda_returns, value_loss
from tests.unit.sao.rollouts import interaction, rollout

BAND = (0.2, 4.0)


def test_1_reward_lies_on_the_last_action_token_not_on_the_last_attended_one() -> None:
    """The sequence goes on with observations (an untrained turn) after the last action token."""
    claimed = rollout(
        interaction("a", None, [101], [1]),
        interaction("b", "a", [102], [2], skip=SkipReason.AFTER_CLOSE),
        interaction("c", "b", [103], [3]),
        interaction("d", "c", [104, 105], [4], skip=SkipReason.AFTER_CLOSE),
        final=1.0,
    )
    (t,) = build_trajectories([claimed])
    assert t.rewards.tolist() == [0.0, 1.0]
    assert t.token_ids[t.action_positions[-1]].item() == 3
    with pytest.raises(ValueError, match="no_action_tokens"):
        build_trajectories([rollout(interaction("a", None, [101], [1], skip=SkipReason.AFTER_CLOSE), final=1.0)])


def test_2_the_last_action_is_not_at_the_number_of_actions_minus_one() -> None:
    """Six tokens, actions at 1, 2, 5: `mask.sum() - 1` is position 2, in the first turn."""
    claimed = rollout(interaction("a", None, [101], [1, 2]), interaction("b", "a", [102, 103], [3]), final=1.0)
    (t,) = build_trajectories([claimed])
    per_position = torch.zeros(6).index_put((t.action_positions,), t.rewards)
    assert per_position.tolist() == [0, 0, 0, 0, 0, 1.0]


def test_3_values_belong_to_the_state_before_the_token() -> None:
    """Values are indexed by the token they precede: the first token has a state, so it must not be at position 0."""
    # a critic that is right before each token leaves no advantage; one shifted by a token does not
    rewards = torch.tensor([1.0, 2.0, 4.0])
    before = torch.tensor([7.0, 6.0, 4.0])
    assert gae(rewards, before, 1.0, 0.9).tolist() == [0.0, 0.0, 0.0]
    after = torch.tensor([6.0, 4.0, 0.0])
    assert gae(rewards, after, 1.0, 0.9).abs().min() > 0
    with pytest.raises(ValueError, match="empty prompt"):
        build_trajectories([rollout(interaction("a", None, [], [1, 2]))])


@pytest.mark.parametrize("size", [1, 2, 5, 7, 23])
def test_4_gradients_do_not_depend_on_the_micro_batch(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    n, vocabulary = 23, 13
    logits = torch.randn(n, vocabulary, generator=generator)
    base = torch.randn(n, vocabulary, generator=generator).log_softmax(-1)
    actions = torch.randint(vocabulary, (n, 1), generator=generator)
    behaviour = logits.log_softmax(-1).gather(-1, actions).squeeze(-1) + torch.randn(n, generator=generator)
    advantages, values = torch.randn(n, generator=generator), torch.randn(n, generator=generator)

    def gradients(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, v = logits.clone().requires_grad_(), values.clone().requires_grad_()
        for rows in torch.arange(n).split(size):
            logprobs = x[rows].log_softmax(-1)
            chosen = logprobs.gather(-1, actions[rows]).squeeze(-1)
            loss = policy_loss(chosen, behaviour[rows], advantages[rows], BAND, token_count=n)
            loss = loss + 0.05 * forward_kl(base[rows], logprobs).sum() / n
            (loss + value_loss(v[rows], advantages[rows], token_count=n)).backward()
        assert x.grad is not None
        assert v.grad is not None
        return x.grad, v.grad

    for actual, expected in zip(gradients(size), gradients(n), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    # what the mistake would do: a mean per micro-batch scales with their number
    with pytest.raises(ValueError, match="whole batch"):
        policy_loss(values, values, values, BAND, token_count=0)


def test_5_off_distribution_interactions_are_context_only() -> None:
    claimed = rollout(
        interaction("a", None, [101], [1], skip=SkipReason.OFF_DISTRIBUTION_SAMPLING, temperature=0.0),
        interaction("b", "a", [102], [2], temperature=0.7),
    )
    (t,) = build_trajectories([claimed])
    assert t.token_ids.tolist() == [101, 1, 102, 2]
    assert t.action_positions.tolist() == [3]
    assert t.temperatures.tolist() == pytest.approx([0.7])


def test_6_no_nan_from_infinity_times_zero() -> None:
    logprobs = torch.tensor([-0.1, -200.0, -math.inf, -0.2], requires_grad=True)
    behaviour = torch.tensor([-800.0, -0.1, -0.1, -0.2])
    assert dis_weights(logprobs - behaviour, BAND).tolist() == [0.0, 0.0, 0.0, 1.0]
    loss = policy_loss(logprobs, behaviour, torch.ones(4), BAND, 4)
    assert loss.item() == pytest.approx(0.05)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0, -0.25]
    assert dis_weights(torch.tensor([math.nan, math.inf, -math.inf]), BAND).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_7_ratios_on_the_bands_edge_are_masked(dtype: torch.dtype) -> None:
    edges = torch.tensor([0.2, 4.0], dtype=dtype).log()
    assert dis_weights(edges, BAND).tolist() == [0.0, 0.0]
    inside = torch.stack([edges[0].nextafter(edges[1]), edges[1].nextafter(edges[0])])
    assert dis_weights(inside, BAND).tolist() == pytest.approx([0.2, 4.0])
    # the band configured through eps = 0.8 would let the lower edge pass
    assert 1 - 0.8 < 0.2
    assert dis_weights(torch.tensor([math.log(0.2)], dtype=torch.float64), (1 - 0.8, 4.0)).item() > 0


def test_9_short_or_missing_logprobs_are_never_padded() -> None:
    for logprobs in ([], [-0.1]):
        with pytest.raises(ValueError, match="not padded"):
            build_trajectories([rollout(interaction("a", None, [101], [1, 2], logprobs=logprobs))])


def test_12_tied_rewards_still_teach_the_critic_and_ev_is_none() -> None:
    values = torch.tensor([0.3, 0.4, 0.2], requires_grad=True)
    targets = lambda_returns(torch.tensor([0.0, 0.0, 1.0]), values.detach(), 1.0, 1.0)
    assert explained_variance(values, targets) is None
    assert explained_variance(values, targets + torch.tensor([0.0, 0.0, 1e-7])) is None
    value_loss(values, targets, 3).backward()
    assert values.grad is not None
    assert values.grad.abs().min() > 0


def test_13_one_lambda_per_rollout_cannot_broadcast_over_a_batch() -> None:
    """Two rollouts of 2 and 4 tokens have two lambdas; a batch axis is refused instead of broadcast."""
    rewards = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="1-D"):
        gae(rewards, rewards, 1.0, 0.9)
    with pytest.raises(ValueError, match="1-D"):
        gae(torch.zeros(4), torch.zeros(4, 1), 1.0, 0.9)
    with pytest.raises(ValueError, match="1-D"):
        lambda_returns(torch.zeros(4), torch.zeros(3), 1.0, 1.0)
    short, long = policy_lambda(2, 1.5), policy_lambda(4, 1.5)
    assert (short, long) == (pytest.approx(2 / 3), pytest.approx(5 / 6))
    # only the last token earns 1, V = 0: the first token's advantage is lambda^(l - 1)
    assert gae(torch.tensor([0.0, 1.0]), torch.zeros(2), 1.0, short)[0].item() == pytest.approx(short)
    assert gae(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4), 1.0, long)[0].item() == pytest.approx(long**3)


def test_returns_are_built_before_whitening() -> None:
    """Whitened advantages have no reward scale: a target made of them would not be the return."""
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    targets = lambda_returns(rewards, values, 1.0, 1.0)
    assert targets.tolist() == [1.0, 1.0]
    whitened = whiten(gae(rewards, values, 1.0, 0.5), floor=0.1)
    assert not np.allclose((whitened + values).tolist(), targets.tolist())
