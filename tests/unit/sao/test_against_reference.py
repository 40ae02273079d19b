"""learner/sao in float32 against the slow float64 reference: 1e-6 on random rollouts with observations in between."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.sao.advantages import gae, policy_lambda, whiten
from learner.sao.anchor import forward_kl
from learner.sao.objective import dis_weights, policy_loss
from learner.sao.value import explained_variance, lambda_returns, value_loss
from tests.unit.sao import reference
from tests.unit.sao.reference import Token

TOLERANCE = 1e-6
repeatable = settings(deadline=None, derandomize=True)
BANDS = [(0.2, 4.0), (0.7, 6.0)]


def float32_exact(tokens: list[Token]) -> list[Token]:
    """The same tokens with every number rounded to float32, so that both sides start from equal inputs."""

    def rounded(number: float) -> float:
        return torch.tensor(number, dtype=torch.float32).item()

    return [
        replace(
            t,
            reward=rounded(t.reward),
            value=rounded(t.value),
            logprob=rounded(t.logprob),
            behaviour=rounded(t.behaviour),
        )
        for t in tokens
    ]


def column(tokens: list[Token], name: str) -> torch.Tensor:
    return torch.tensor([getattr(t, name) for t in tokens if t.action], dtype=torch.float32)


rollouts = st.integers(0, 2**32).map(lambda seed: float32_exact(reference.random_rollout(random.Random(seed))))
batches = st.lists(rollouts, min_size=1, max_size=6)
unit = st.floats(0, 1)
gammas = st.floats(0.5, 1)


def assert_close(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), atol=TOLERANCE, rtol=TOLERANCE)


@repeatable
@given(rollouts, gammas, unit)
def test_gae(tokens: list[Token], gamma: float, lam: float) -> None:
    actual = gae(column(tokens, "reward"), column(tokens, "value"), gamma, lam)
    assert_close(actual, reference.advantages(tokens, gamma, lam))


@repeatable
@given(rollouts, gammas, unit)
def test_lambda_returns(tokens: list[Token], gamma: float, lam: float) -> None:
    actual = lambda_returns(column(tokens, "reward"), column(tokens, "value"), gamma, lam)
    assert_close(actual, reference.lambda_returns(tokens, gamma, lam))


@repeatable
@given(rollouts, gammas, unit, st.floats(-1, 1, width=32))
def test_what_lies_beyond_a_cut(tokens: list[Token], gamma: float, lam: float, end: float) -> None:
    rewards, values = column(tokens, "reward"), column(tokens, "value")
    assert_close(gae(rewards, values, gamma, lam, end), reference.advantages(tokens, gamma, lam, end))
    assert_close(lambda_returns(rewards, values, gamma, lam, end), reference.lambda_returns(tokens, gamma, lam, end))


@repeatable
@given(rollouts, gammas, unit)
def test_lambda_return_is_advantage_plus_value(tokens: list[Token], gamma: float, lam: float) -> None:
    rewards, values = column(tokens, "reward"), column(tokens, "value")
    torch.testing.assert_close(
        lambda_returns(rewards, values, gamma, lam), gae(rewards, values, gamma, lam) + values, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("band", BANDS)
@repeatable
@given(rollouts)
def test_dis_weights(band: tuple[float, float], tokens: list[Token]) -> None:
    actual = dis_weights(column(tokens, "logprob") - column(tokens, "behaviour"), band)
    expected = [reference.dis_weight(t.logprob, t.behaviour, *band) for t in tokens if t.action]
    assert_close(actual, expected)


@pytest.mark.parametrize("band", BANDS)
@repeatable
@given(batches, st.booleans())
def test_policy_loss_of_a_batch(band: tuple[float, float], batch: list[list[Token]], whitened: bool) -> None:
    advantages = []
    expected_advantages = []
    for tokens in batch:
        lam = policy_lambda(sum(t.action for t in tokens), alpha=1.5)
        advantages.append(gae(column(tokens, "reward"), column(tokens, "value"), 1.0, lam))
        expected_advantages.append(reference.advantages(tokens, 1.0, lam))
    if whitened:
        flat = reference.whiten([a for rollout in expected_advantages for a in rollout], floor=0.1)
        rest = iter(flat)
        expected_advantages = [[next(rest) for _ in rollout] for rollout in expected_advantages]
    count = sum(len(a) for a in expected_advantages)
    joined = whiten(torch.cat(advantages), floor=0.1) if whitened else torch.cat(advantages)
    actual = policy_loss(
        torch.cat([column(tokens, "logprob") for tokens in batch]),
        torch.cat([column(tokens, "behaviour") for tokens in batch]),
        joined,
        band,
        count,
    )
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(reference.policy_loss(batch, expected_advantages, *band), abs=TOLERANCE)


def test_policy_gradient_is_that_of_the_paper() -> None:
    """d loss / d logits = -(f(r) A / N) (onehot - pi), written out with loops over tokens and vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 11, generator=generator).requires_grad_()
    actions = torch.randint(11, (40,), generator=generator)
    advantages = torch.randn(40, generator=generator)
    logprobs = logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    behaviour = logprobs.detach() + torch.randn(40, generator=generator)
    policy_loss(logprobs, behaviour, advantages, (0.2, 4.0), token_count=40).backward()

    weights = [reference.dis_weight(p, b, 0.2, 4.0) for p, b in zip(logprobs.tolist(), behaviour.tolist(), strict=True)]
    assert 0 < sum(w == 0 for w in weights) < 40
    probabilities = logits.detach().double().softmax(-1).tolist()
    for t, action in enumerate(actions.tolist()):
        for v in range(11):
            expected = -weights[t] * advantages[t].item() / 40 * ((v == action) - probabilities[t][v])
            assert logits.grad is not None
            assert logits.grad[t, v].item() == pytest.approx(expected, abs=TOLERANCE)


@repeatable
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=60), st.sampled_from([0.1, 1.0]))
def test_whitening(numbers: list[float], floor: float) -> None:
    actual = whiten(torch.tensor(numbers), floor)
    expected = reference.whiten(numbers, floor)
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), atol=TOLERANCE, rtol=TOLERANCE)


@repeatable
@given(rollouts, gammas, unit)
def test_value_loss_and_explained_variance(tokens: list[Token], gamma: float, lam: float) -> None:
    values, targets = column(tokens, "value"), column(tokens, "behaviour")
    loss = value_loss(values, targets, values.numel())
    assert loss.item() == pytest.approx(reference.value_loss(values.tolist(), targets.tolist()), rel=TOLERANCE)
    explained = explained_variance(values, targets)
    if explained is None:
        assert len(set(targets.tolist())) == 1
    else:
        assert explained == pytest.approx(
            reference.explained_variance(values.tolist(), targets.tolist()), abs=TOLERANCE, rel=TOLERANCE
        )


@repeatable
@given(st.integers(0, 2**32), st.floats(0.1, 3))
def test_forward_kl(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(7, 50, generator=generator) * scale).log_softmax(-1)
    policy = (torch.randn(7, 50, generator=generator) * scale).log_softmax(-1)
    expected = [reference.forward_kl(b, p) for b, p in zip(base.tolist(), policy.tolist(), strict=True)]
    actual = forward_kl(base, policy)
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), atol=TOLERANCE, rtol=TOLERANCE)
