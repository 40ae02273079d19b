"""Centring: what a batch pushes all of its tokens by together is taken out of the policy's gradient, but for a share.

Not in the paper; docs/decisions/0009 says why. Rollouts of one task have nearly the same states, so what moves one
answer moves all of them, and the noise of a small batch adds up there: measured on SmolLM2 and tickets, 99 % of a plain
step is such a common movement and 1 % tells tickets apart. The objective's gradient in the tempered logits of an
action token is its push, f(r_t) A_t (onehot(a_t) - pi(. | s_t)). Taking the common part out of the pushes is a natural
gradient (Kakade 2001) under a kernel that knows a common part and a part of each token's own.

What is taken out is spread over the tokens by their mobility, 1 - sum_v pi(v)^2, the trace of a softmax's Fisher
matrix: a token whose answer is settled takes no part, tokens that are all alike share evenly. Openings (the first token
of an action, where an answer is chosen) and the tokens inside an action are centred apart: their states have little in
common.
"""

import torch
from torch import Tensor


def mobility(logprobs: Tensor) -> Tensor:
    """(T,) 1 - sum_v pi(v)^2, in [0, 1). Detached. logprobs: (T, V) log pi, nats."""
    return 1.0 - (2.0 * logprobs.detach()).exp().sum(-1)


def push_sums(logprobs: Tensor, action_ids: Tensor, weights: Tensor, opening: Tensor) -> tuple[Tensor, Tensor]:
    """(2, V) sums of the pushes and (2,) of the mobilities: of the tokens inside an action, of the openings. Detached.

    logprobs: (T, V) log pi, nats. action_ids: (T,). weights: (T,) f(r_t) A_t. opening: (T,) bool.
    """
    pushes = -logprobs.detach().exp() * weights.unsqueeze(1)
    pushes[torch.arange(len(weights)), action_ids] += weights
    mobilities = mobility(logprobs)
    return (
        torch.stack([pushes[kind].sum(0) for kind in (~opening, opening)]),
        torch.stack([mobilities[kind].sum() for kind in (~opening, opening)]),
    )


def common_pushes(pushes: Tensor, mobilities: Tensor) -> Tensor:
    """(2, V): what a token of mobility 1 has of its kind's common push. Arguments: `push_sums` of the WHOLE batch.

    Never more than the sum, however settled the tokens are.
    """
    return pushes / mobilities.clamp(min=1.0).unsqueeze(1)


def centring_loss(logprobs: Tensor, opening: Tensor, common: Tensor, centring: float, token_count: int) -> Tensor:
    """Added to `policy_loss`: its gradient takes `centring` times the common push, by mobility, from every token's.

    logprobs: (T, V) log pi, nats, with gradient. opening: (T,) bool. common: (2, V) of `common_pushes`. token_count: N
    of the whole batch. Returns a scalar.

    A push sums to 0 over the vocabulary, so its gradient through a log-softmax is itself.
    """
    taken = (common[opening.long()] * logprobs).sum(-1) * mobility(logprobs)
    return centring * taken.sum() / token_count
