"""Advantages without a critic, to compare SAO with: a running mean of returns, and GRPO's group."""

from collections.abc import Sequence

from torch import Tensor, float64, full_like, tensor, zeros_like

RETURNS_KEPT = 128
"""Returns in the running mean: arXiv 2607.07508 section 4.5 compares with "the last 128 rewards"."""
GROUP_EPSILON = 1e-6
"""Keeps the advantages of a group whose returns nearly tie finite."""


def running_mean_baselines(returns: Tensor, earlier: Sequence[float]) -> Tensor:
    """(B,) what each rollout's return is compared with: the mean of the newest RETURNS_KEPT of the `earlier` returns.

    returns: (B,) of this batch's rollouts. earlier: those of the rollouts trained before this batch, oldest first, so
    that no baseline holds the rollout's own return, which would bias the gradient. Before the first batch there are
    none: then each rollout is compared with the mean of the batch's others (leave-one-out, arXiv 2402.14740), and one
    that is alone with itself.
    """
    exact = returns.detach().double()
    if len(earlier) > 0:
        mean = tensor(earlier[-RETURNS_KEPT:], dtype=float64).mean().item()
        return full_like(returns, mean)
    if len(exact) == 1:
        return returns.detach().clone()
    return ((exact.sum() - exact) / (len(exact) - 1)).to(returns.dtype)


def group_advantages(returns: Tensor, groups: Sequence[int]) -> Tensor:
    """(B,) GRPO's outcome advantage (arXiv 2402.03300 section 4.1.2): (R - mean) / (std + GROUP_EPSILON) of its group.

    returns: (B,). groups: per rollout the number of its group, B of them.

    The paper does not say which std. This is the sample's (divided by G - 1), and the epsilon is that, of verl's
    compute_grpo_outcome_advantage. A group whose returns tie has the advantage 0, and so has a rollout that is alone
    (verl keeps its bare return then, which compares it with 0).
    """
    if returns.dim() != 1 or len(groups) != len(returns):
        raise ValueError(f"{len(groups)} group numbers for returns of shape {tuple(returns.shape)}")
    exact = returns.detach().double()
    numbers = tensor(groups)
    advantages = zeros_like(exact)
    for number in set(groups):
        members = numbers == number
        of_group = exact[members]
        if of_group.min() < of_group.max():
            advantages[members] = (of_group - of_group.mean()) / (of_group.std(correction=1) + GROUP_EPSILON)
    return advantages.to(returns.dtype)
