"""Centring: what a batch pushes all of its tokens by together is taken out of the policy's gradient, but for a share.

Not in the paper; docs/decisions/0009 and 0015 say why. Rollouts of one task have nearly the same states, so what moves
one answer moves all of them, and the noise of a small batch adds up there: measured on SmolLM2 and tickets, 99 % of a
plain step is such a common movement and 1 % tells tickets apart. The objective's gradient in the tempered logits of an
action token is its push, f(r_t) A_t (onehot(a_t) - pi(. | s_t)). Taking the common part out of the pushes is a natural
gradient (Kakade 2001) under a kernel that knows a common part and a part of each token's own.

Where one answer is right for every prompt the common part is the signal, so what is certainly no noise stays in: the
common push is shrunk as James and Stein (1961, positive part) shrink a mean, by what tokens that push independently of
each other would add up to by chance. One batch cannot tell the two apart; several can (`PushEvidence`), since a signal
pushes the same way in each.

What is taken out is spread over the tokens by their mobility, 1 - sum_v pi(v)^2, the trace of a softmax's Fisher
matrix: a token whose answer is settled takes no part, tokens that are all alike share evenly. Openings (the first token
of an action, where an answer is chosen) and the tokens inside an action are centred apart: their states have little in
common.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
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


def chance(sums: PushSums) -> Tensor:
    """(2,) the square of the common push that its kind's tokens would have by chance, if they pushed independently.

    (sum |p_t|^2 - |sum p_t|^2 / n) n / (n - 1), with the variance that they have here. A single token has none to be
    compared with: all of its push may be chance.
    """
    n = sums.tokens
    spread = sums.squares - sums.pushes.square().sum(1) / n.clamp(min=1)
    # rounding can leave it below 0
    return torch.where(n > 1, (spread * n / (n - 1).clamp(min=1)).clamp(min=0.0), sums.squares)


class PushEvidence:
    """Which share of the common push is no more than chance, by the policy's last few batches.

    With a forgetting of g per batch, the common pushes of several batches sum up to S <- g S + sum p_t, and their
    squares by chance to N <- g^2 N + `chance`. Noise leaves |S|^2 / N where it is; a push that is the same in every
    batch raises it up to (1 + g) / (1 - g)-fold. Within two standard deviations of chance, |S|^2 <= 4 N, all is noise.
    """

    FORGETTING = 0.8
    CERTAIN = 4.0

    def __init__(self) -> None:
        self.pushes: Tensor | None = None
        """(2, V) S; None before the first batch."""
        self.chance: Tensor | None = None
        """(2,) N"""

    def add(self, sums: PushSums) -> None:
        """sums: of a whole batch."""
        if self.pushes is None or self.chance is None:
            self.pushes, self.chance = torch.zeros_like(sums.pushes), torch.zeros_like(sums.squares)
        # a checkpoint's are on the CPU
        self.pushes = self.FORGETTING * self.pushes.to(sums.pushes.device) + sums.pushes
        self.chance = self.FORGETTING**2 * self.chance.to(sums.squares.device) + chance(sums)

    def reset(self) -> None:
        """Forgets all batches: while nothing is centred nothing is gathered, and what was before is of another time."""
        self.pushes, self.chance = None, None

    def noise_share(self) -> Tensor:
        """(2,) in [0, 1], of the kinds' common pushes: min(1, 4 N / |S|^2)."""
        assert self.pushes is not None
        assert self.chance is not None
        # 0 / 0 is no evidence of anything
        return (self.CERTAIN * self.chance / self.pushes.square().sum(1)).nan_to_num(nan=1.0).clamp(max=1.0)

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"pushes": self.pushes, "chance": self.chance}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        self.pushes, self.chance = state["pushes"], state["chance"]


def total(parts: Iterable[PushSums]) -> PushSums:
    """parts: at least one."""
    return reduce(lambda a, b: PushSums(*(x + y for x, y in zip(a, b, strict=True))), parts)


def common_pushes(sums: PushSums, noise_share: Tensor) -> Tensor:
    """(2, V): what centring takes from a token of mobility 1, of its kind's.

    sums: of the WHOLE batch. noise_share: (2,) of `PushEvidence`. Never more than the sum, however settled the tokens
    are.
    """
    return sums.pushes * (noise_share / sums.mobilities.clamp(min=1.0)).unsqueeze(1)


def centring_loss(logprobs: Tensor, opening: Tensor, common: Tensor, centring: float, token_count: int) -> Tensor:
    """Added to `policy_loss`: its gradient takes `centring` times `common`, by mobility, from every token's push.

    logprobs: (T, V) log pi, nats, with gradient. opening: (T,) bool. common: (2, V) of `common_pushes`. token_count: N
    of the whole batch. Returns a scalar.

    A push sums to 0 over the vocabulary, so its gradient through a log-softmax is itself.
    """
    taken = (common[opening.long()] * logprobs).sum(-1) * mobility(logprobs)
    return centring * taken.sum() / token_count
