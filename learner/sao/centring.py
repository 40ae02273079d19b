"""Centring: what a batch pushes all of its tokens by together is taken out of the policy's gradient, but for a share.

Not in the paper; docs/decisions/0009 and 0015 say why. Rollouts of one task have nearly the same states, so what moves
one answer moves all of them, and the noise of a small batch adds up there: measured on SmolLM2 and tickets, 99 % of a
plain step is such a common movement and 1 % tells tickets apart. The objective's gradient in the tempered logits of an
action token is its push, f(r_t) A_t (onehot(a_t) - pi(. | s_t)). Taking the common part out of the pushes is a natural
gradient (Kakade 2001) under a kernel that knows a common part and a part of each token's own.

Where one answer is right for every prompt the common part is the signal. With a threshold it is shrunk as James and
Stein (1961, positive part) shrink a mean: taken out is so many times the share of its square that tokens which push
independently of each other would have by chance.

What is taken out is spread over the tokens by their mobility, 1 - sum_v pi(v)^2, the trace of a softmax's Fisher
matrix: a token whose answer is settled takes no part, tokens that are all alike share evenly. Openings (the first token
of an action, where an answer is chosen) and the tokens inside an action are centred apart: their states have little in
common.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PushSums(NamedTuple):
    """Sums over tokens of two kinds, in this order: inside an action, opening one."""

    pushes: Tensor
    """(2, V)"""
    squares: Tensor
    """(2,) of the pushes' squared lengths."""
    mobilities: Tensor
    """(2,)"""
    tokens: Tensor
    """(2,) how many."""


def mobility(logprobs: Tensor) -> Tensor:
    """(T,) 1 - sum_v pi(v)^2, in [0, 1). Detached. logprobs: (T, V) log pi, nats."""
    return 1.0 - (2.0 * logprobs.detach()).exp().sum(-1)


def push_sums(logprobs: Tensor, action_ids: Tensor, weights: Tensor, opening: Tensor) -> PushSums:
    """Of some of a batch's tokens. Detached.

    logprobs: (T, V) log pi, nats. action_ids: (T,). weights: (T,) f(r_t) A_t. opening: (T,) bool.
    """
    pushes = -logprobs.detach().exp() * weights.unsqueeze(1)
    pushes[torch.arange(len(weights)), action_ids] += weights
    squares, mobilities = pushes.square().sum(1), mobility(logprobs)
    kinds = (~opening, opening)
    return PushSums(
        torch.stack([pushes[kind].sum(0) for kind in kinds]),
        torch.stack([squares[kind].sum() for kind in kinds]),
        torch.stack([mobilities[kind].sum() for kind in kinds]),
        torch.stack([kind.sum() for kind in kinds]),
    )


def chance_share(sums: PushSums) -> Tensor:
    """(2,) which share of the common push's square its kind's tokens would have by chance; above 1 if they agree less.

    By chance, (sum |p_t|^2 - |sum p_t|^2 / n) n / (n - 1): n tokens that push independently, with the variance that
    they have here. 0 for a single token, which has no other to be told from.
    """
    common = sums.pushes.square().sum(1)
    n = sums.tokens
    chance = (sums.squares - common / n.clamp(min=1)) * n / (n - 1).clamp(min=1)
    # rounding can leave a chance below 0; without a common push there is nothing to share
    return torch.where(common > 0, (chance / common).clamp(min=0.0), 0.0)


def common_pushes(parts: Sequence[PushSums], threshold: float | None) -> Tensor:
    """(2, V): what centring takes from a token of mobility 1, of its kind's. parts: of the WHOLE batch.

    threshold: so many times chance's share of the common push, at most all of it; None: all of it. Never more than the
    sum, however settled the tokens are.
    """
    sums = PushSums(*(torch.stack(of).sum(0) for of in zip(*parts, strict=True)))
    taken = sums.pushes / sums.mobilities.clamp(min=1.0).unsqueeze(1)
    if threshold is None:
        return taken
    return taken * (threshold * chance_share(sums)).clamp(max=1.0).unsqueeze(1)


def centring_loss(logprobs: Tensor, opening: Tensor, common: Tensor, centring: float, token_count: int) -> Tensor:
    """Added to `policy_loss`: its gradient takes `centring` times `common`, by mobility, from every token's push.

    logprobs: (T, V) log pi, nats, with gradient. opening: (T,) bool. common: (2, V) of `common_pushes`. token_count: N
    of the whole batch. Returns a scalar.

    A push sums to 0 over the vocabulary, so its gradient through a log-softmax is itself.
    """
    taken = (common[opening.long()] * logprobs).sum(-1) * mobility(logprobs)
    return centring * taken.sum() / token_count
