"""SAO once more, slowly: plain Python floats, one rollout, one token after another, observations left on the axis.

Written from the paper's sums rather than from the recursions that learner/sao uses; it shares no code with it.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """A token as it lies in the context. An observation has no value, no ratio and earns nothing."""

    action: bool
    reward: float = 0.0
    value: float = 0.0
    logprob: float = 0.0
    behaviour: float = 0.0


def next_action(tokens: list[Token], position: int) -> int | None:
    while position + 1 < len(tokens):
        position += 1
        if tokens[position].action:
            return position
    return None


def delta(tokens: list[Token], t: int, gamma: float, end: float) -> float:
    following = next_action(tokens, t)
    bootstrap = end if following is None else tokens[following].value
    return tokens[t].reward + gamma * bootstrap - tokens[t].value


def advantages(tokens: list[Token], gamma: float, lam: float, end: float = 0.0) -> list[float]:
    """A_t = sum over k of (gamma lambda)^k delta of the k-th action token after t. end: V beyond the last token."""
    result = []
    for t, token in enumerate(tokens):
        if not token.action:
            continue
        total, k, at = 0.0, 0, t
        while at is not None:
            total += (gamma * lam) ** k * delta(tokens, at, gamma, end)
            k, at = k + 1, next_action(tokens, at)
        result.append(total)
    return result


def n_step_return(actions: list[Token], t: int, n: int, gamma: float, end: float) -> float:
    rewards = sum(gamma**i * actions[t + i].reward for i in range(n))
    return rewards + gamma**n * (actions[t + n].value if t + n < len(actions) else end)


def lambda_returns(tokens: list[Token], gamma: float, lam: float, end: float = 0.0) -> list[float]:
    """The lambda-return as the mixture of all n-step returns. end: V beyond the last token."""
    actions = [token for token in tokens if token.action]
    result = []
    for t in range(len(actions)):
        steps = len(actions) - t
        mixture = sum((1 - lam) * lam ** (n - 1) * n_step_return(actions, t, n, gamma, end) for n in range(1, steps))
        result.append(mixture + lam ** (steps - 1) * n_step_return(actions, t, steps, gamma, end))
    return result


def dis_weight(logprob: float, behaviour: float, low: float, high: float) -> float:
    ratio = math.exp(logprob) / math.exp(behaviour)
    return ratio if low < ratio < high else 0.0


def policy_loss(
    rollouts: list[list[Token]], advantages_per_rollout: list[list[float]], low: float, high: float
) -> float:
    total, count = 0.0, 0
    for tokens, advantage in zip(rollouts, advantages_per_rollout, strict=True):
        for token, a in zip((t for t in tokens if t.action), advantage, strict=True):
            total -= dis_weight(token.logprob, token.behaviour, low, high) * a * token.logprob
            count += 1
    return total / count


def ppo_surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    """Equation 7 of arXiv 1707.06347 for one token: min(r A, clip(r, low, high) A)."""
    clipped = low if ratio < low else high if ratio > high else ratio
    return min(ratio * advantage, clipped * advantage)


def slope(function: Callable[[float], float], at: float, step: float = 1e-6) -> float:
    """Its derivative there, by the central difference."""
    return (function(at + step) - function(at - step)) / (2 * step)


def running_mean_advantages(tokens: list[Token], earlier: list[float], gamma: float) -> list[float]:
    """Discounted sum of the rewards from the token on, minus the mean of the last 128 returns."""
    last = earlier[-128:]
    baseline = sum(last) / len(last)
    actions = [token for token in tokens if token.action]
    return [
        sum(gamma ** (k - t) * actions[k].reward for k in range(t, len(actions))) - baseline
        for t in range(len(actions))
    ]


def group_advantages(returns: list[float], groups: list[int]) -> list[float]:
    """(R - mean) / (std + 1e-6) among the rollouts of the same group, std over G - 1; 0 where they all tie."""
    result = []
    for own, group in zip(returns, groups, strict=True):
        of_group = [r for r, g in zip(returns, groups, strict=True) if g == group]
        if max(of_group) == min(of_group):
            result.append(0.0)
        else:
            result.append((own - statistics.fmean(of_group)) / (statistics.stdev(of_group) + 1e-6))
    return result


def whiten(values: list[float], floor: float) -> list[float]:
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / max(std, floor) for value in values]


def value_loss(values: list[float], targets: list[float]) -> float:
    return statistics.fmean((v - g) ** 2 for v, g in zip(values, targets, strict=True))


def explained_variance(values: list[float], targets: list[float]) -> float:
    errors = [g - v for v, g in zip(values, targets, strict=True)]
    return 1 - statistics.pvariance(errors) / statistics.pvariance(targets)


def forward_kl(base: list[float], policy: list[float]) -> float:
    return math.fsum(math.exp(b) * (b - p) for b, p in zip(base, policy, strict=True))


def random_rollout(rng: random.Random) -> list[Token]:
    """Observations before, between and after 1 to 6 turns of 1 to 5 action tokens; rewards on some turns' last."""
    tokens = [Token(action=False)] * rng.randint(1, 4)
    for _ in range(rng.randint(1, 6)):
        length = rng.randint(1, 5)
        for i in range(length):
            behaviour = rng.uniform(-4.0, -0.01)
            tokens.append(
                Token(
                    action=True,
                    reward=rng.uniform(-1, 1) if i == length - 1 and rng.random() < 0.7 else 0.0,
                    value=rng.uniform(-1, 1),
                    logprob=min(behaviour + rng.gauss(0, 1.2), -1e-3),
                    behaviour=behaviour,
                )
            )
        tokens += [Token(action=False)] * rng.randint(0, 3)
    return tokens
