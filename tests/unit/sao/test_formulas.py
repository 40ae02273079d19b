"""Numbers worked out by hand, edges, and the shapes that are refused."""

import math

import pytest
import torch

from learner.sao import health
from learner.sao.advantages import gae, policy_lambda, whiten
from learner.sao.anchor import expected_reward, failing, forward_kl, settled
from learner.sao.objective import dis_accepted, dis_weights, log_band, policy_loss
from learner.sao.value import explained_variance, lambda_returns, value_loss


def test_two_turns_by_hand() -> None:
    """Context: o o a1 a2 o a3 (o = observation). rewards: 0 on a1, 0.5 on a2 (turn 1), 1 on a3; V = 0.2, 0.4, 0.1.

    gamma 0.9, lambda 0.5, gamma * lambda = 0.45:
      a3: delta = 1 - 0.1 = 0.9                       A = 0.9
      a2: delta = 0.5 + 0.9 * 0.1 - 0.4 = 0.19        A = 0.19 + 0.45 * 0.9 = 0.595
      a1: delta = 0 + 0.9 * 0.4 - 0.2 = 0.16          A = 0.16 + 0.45 * 0.595 = 0.42775
    and G = A + V: 0.62775, 0.995, 1.0.
    """
    rewards, values = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.2, 0.4, 0.1])
    torch.testing.assert_close(gae(rewards, values, 0.9, 0.5), torch.tensor([0.42775, 0.595, 0.9]))
    torch.testing.assert_close(lambda_returns(rewards, values, 0.9, 0.5), torch.tensor([0.62775, 0.995, 1.0]))


def test_one_terminal_reward_is_the_target_everywhere() -> None:
    """gamma = lambda = 1: every target is the return, bit for bit, whatever the critic says."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.7])
    targets = lambda_returns(rewards, torch.tensor([3.1, -2.7, 0.3, 9.0]), 1.0, 1.0)
    assert targets.tolist() == [rewards[-1].item()] * 4


def test_lambda_of_the_policy() -> None:
    # 1 - 1 / (1.5 * 10) = 14/15; 1 - 1 / 1.5 = 1/3; alpha 0.5 and l = 1 would be -1: clamped
    assert policy_lambda(10, 1.5) == pytest.approx(14 / 15)
    assert policy_lambda(1, 1.5) == pytest.approx(1 / 3)
    assert policy_lambda(1, 0.5) == 0.0
    with pytest.raises(ValueError, match="at least one action token"):
        policy_lambda(0, 1.5)


def test_whitening_by_hand() -> None:
    # mean 2.5, population variance 1.25 (the sample variance would be 5/3)
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)
    torch.testing.assert_close(whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]), floor=0.1), expected)
    # std 0.01 is below the floor: divided by 0.1
    torch.testing.assert_close(whiten(torch.tensor([0.49, 0.51]), floor=0.1), torch.tensor([-0.1, 0.1]))
    assert whiten(torch.tensor([0.3]), floor=0.1).tolist() == [0.0]


def test_policy_loss_by_hand() -> None:
    """Ratios 2, 5 (masked), 0.5; A = 1, 1, -2; log pi = log 0.5, log 0.5, log 0.25; N = 4 (one more token elsewhere).

    -(2 * 1 * log 0.5 + 0 + 0.5 * -2 * log 0.25) / 4 = -(-2 log 2 + 2 log 2) / 4 = 0; with A3 = -1: log 2 / 4.
    """
    pi = torch.tensor([0.5, 0.5, 0.25]).log()
    behaviour = torch.tensor([0.25, 0.1, 0.5]).log()
    band = (0.2, 4.0)
    assert policy_loss(pi, behaviour, torch.tensor([1.0, 1.0, -2.0]), band, 4).item() == pytest.approx(0.0, abs=1e-7)
    loss = policy_loss(pi, behaviour, torch.tensor([1.0, 1.0, -1.0]), band, 4)
    assert loss.item() == pytest.approx(math.log(2) / 4, abs=1e-7)


def test_stop_gradient_gradient_equals_that_of_the_masked_ratio() -> None:
    """-sg(f(r)) A log pi and -1[in band] r A have one gradient; without the stop-gradient it differs."""
    generator = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(30, generator=generator) * 3
    start = behaviour + torch.randn(30, generator=generator)
    advantages = torch.randn(30, generator=generator)
    band = (0.2, 4.0)

    logprobs = start.clone().requires_grad_()
    policy_loss(logprobs, behaviour, advantages, band, 30).backward()

    other = start.clone().requires_grad_()
    ratio = (other - behaviour).exp()
    in_band = (ratio > 0.2) & (ratio < 4.0)
    (-(ratio * advantages)[in_band].sum() / 30).backward()

    assert logprobs.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(logprobs.grad, other.grad)
    assert not dis_weights(logprobs, band).requires_grad


def test_the_sign_of_the_advantage_does_not_change_the_band() -> None:
    logprobs, behaviour = torch.tensor([-0.1, -3.0]), torch.tensor([-3.0, -0.1])
    for advantage in (1.0, -1.0):
        assert policy_loss(logprobs, behaviour, torch.full((2,), advantage), (0.2, 4.0), 2).item() == 0.0


def test_band_with_open_ends_and_bad_bands() -> None:
    assert log_band((0.0, math.inf)) == (-math.inf, math.inf)
    assert dis_accepted(torch.tensor([-50.0, 50.0]), (0.0, math.inf)).tolist() == [True, True]
    for band in ((0.5, 0.5), (-0.1, 2.0), (4.0, 0.2)):
        with pytest.raises(ValueError, match="0 <= low < high"):
            log_band(band)


def test_value_loss_and_ev_by_hand() -> None:
    values, targets = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    assert value_loss(values, targets, token_count=6).item() == pytest.approx(2 / 6)
    # errors 1, 0, -1: variance 2/3; targets' variance 2/9: EV = 1 - 3 = -2
    assert explained_variance(values, targets) == pytest.approx(-2.0)
    # a constant offset is not explained away: variance, not mean square
    assert explained_variance(targets + 5, targets) == pytest.approx(1.0)


def test_targets_and_advantages_are_constants() -> None:
    given = torch.tensor([0.5, -1.0], requires_grad=True)
    learnt = torch.tensor([-0.3, -0.2], requires_grad=True)
    (value_loss(learnt, given, 2) + policy_loss(learnt, learnt.detach(), given, (0.2, 4.0), 2)).backward()
    assert given.grad is None
    assert learnt.grad is not None


def test_forward_kl_by_hand_and_its_gradient() -> None:
    """base (1/2, 1/4, 1/4), pi (1/4, 1/4, 1/2): 1/2 log 2 + 0 - 1/4 log 2 = log(2) / 4; logit gradient pi - base."""
    base = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    kl = forward_kl(base, logits.log_softmax(-1))
    assert kl.item() == pytest.approx(math.log(2) / 4, abs=1e-7)
    kl.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.0, 0.25]]))


def test_forward_kl_gradient_numerically() -> None:
    base = torch.randn(4, 9, dtype=torch.float64).log_softmax(-1)
    logprobs = torch.randn(4, 9, dtype=torch.float64).log_softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: forward_kl(base, x), (logprobs,))


def test_anchor_is_alive_where_the_policy_is_deterministic() -> None:
    """pi = 1 on one token up to e^-60: the reverse KL's gradient is 0 there, the anchor's is pi - base."""
    base = torch.tensor([[0.1, 0.9]]).log()
    logits = torch.tensor([[60.0, 0.0]], requires_grad=True)
    forward_kl(base, logits.log_softmax(-1)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.9, -0.9]]))
    reverse = torch.tensor([[60.0, 0.0]], requires_grad=True)
    logprobs = reverse.log_softmax(-1)
    (logprobs.exp() * (logprobs - base)).sum().backward()
    assert reverse.grad is not None
    assert reverse.grad.abs().max().item() < 1e-20


def test_failing_is_what_the_critic_expects_to_be_missing() -> None:
    values = torch.tensor([1.0, 0.5, 0.0, -1.0, 2.0])
    torch.testing.assert_close(failing(values, -1.0, 1.0), torch.tensor([0.0, 0.25, 1.0, 1.0, 0.0]))
    torch.testing.assert_close(failing(torch.tensor([8.0]), 0.0, 10.0), torch.tensor([0.16]))
    assert failing(torch.tensor([float("inf")]), -1.0, 1.0).item() == 0.0


def test_the_expected_reward_of_a_rollout_with_one_is_its_value() -> None:
    values = torch.tensor([0.3, -2.0, 0.7])
    assert torch.equal(expected_reward(values, torch.ones(3).long(), torch.zeros(3).long()), values)


def test_the_expected_reward_by_hand() -> None:
    """Rollouts of 1 and of 5 rewards: 3 to come on average at first, and 2 after one, where the first has none."""
    to_come, before = torch.tensor([1, 5, 4, 0]), torch.tensor([0, 0, 1, 1])
    # of a critic that knows how long each will be, one that does not, and one that expects nothing good
    knows = expected_reward(torch.tensor([1.0, 5.0, 4.0, 0.0]), to_come, before)
    torch.testing.assert_close(knows, torch.tensor([1.0, 5 / 3, 2.0, float("inf")]))
    guesses = expected_reward(torch.tensor([3.0, 3.0, 2.0, 2.0]), to_come, before)
    torch.testing.assert_close(guesses, torch.tensor([3.0, 1.0, 1.0, float("inf")]))
    fails = expected_reward(torch.tensor([-3.0, -3.0, 0.0, 0.0]), to_come, before)
    torch.testing.assert_close(fails, torch.tensor([-1.0, -0.6, 0.0, float("inf")]))


def test_settled_is_the_squared_chance_of_the_same_token_twice() -> None:
    logprobs = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.3, 0.2, 0.0]]).log()
    torch.testing.assert_close(settled(logprobs), torch.tensor([1.0, 0.0625, 0.1444]))


def test_forward_kl_with_tokens_the_base_never_takes() -> None:
    base = torch.tensor([[0.0, -math.inf]])
    logits = torch.zeros(1, 2, requires_grad=True)
    kl = forward_kl(base, logits.log_softmax(-1))
    assert kl.item() == pytest.approx(math.log(2))
    kl.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5]]))


def test_health_figures_by_hand() -> None:
    # r = 2 and 1/2: k3 = ((2 - 1 - log 2) + (1/2 - 1 + log 2)) / 2 = 0.25; ESS = 2.5^2 / (2 * 4.25)
    log_ratio = torch.tensor([2.0, 0.5]).log()
    assert health.k3(log_ratio) == pytest.approx(0.25)
    assert health.mean_abs_log_ratio(log_ratio) == pytest.approx(math.log(2))
    assert health.effective_sample_share(log_ratio) == pytest.approx(6.25 / 8.5)
    # ESS knows no scale; ratios of e^1000 overflow nowhere
    assert health.effective_sample_share(log_ratio + 1000) == pytest.approx(6.25 / 8.5, rel=1e-4)
    shares = health.masked_share(torch.tensor([0.1, 0.3, 1.0, 5.0, 9.0]).log(), torch.ones(5), (0.2, 4.0), "dis")
    assert shares == (pytest.approx(0.2), pytest.approx(0.4))


def test_entropy_by_hand() -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]).log()
    expected = torch.tensor([math.log(2), 0.0, 1.5 * math.log(2)])
    torch.testing.assert_close(health.entropy(logprobs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_in_is_dtype_out(dtype: torch.dtype) -> None:
    x = torch.rand(5, dtype=dtype)
    assert gae(x, x, 1.0, 0.9).dtype == dtype
    assert lambda_returns(x, x, 1.0, 0.9).dtype == dtype
    assert whiten(x, 0.1).dtype == dtype
    assert dis_weights(x, (0.2, 4.0)).dtype == dtype
    assert policy_loss(-x, -x, x, (0.2, 4.0), 5).dtype == dtype
    assert value_loss(x, x, 5).dtype == dtype
    assert forward_kl(x[None].log_softmax(-1), x[None].log_softmax(-1)).dtype == dtype
    assert health.entropy(x[None].log_softmax(-1)).dtype == dtype
