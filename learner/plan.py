"""How a batch is laid out for the model: which trajectories share a prompt prefix, and which rows run together.

A prefix that several trajectories share is computed once for all of them; what is left of each, its suffix, runs in
packed micro-batches on top of the prefix's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from learner.attention import Rows
from learner.trajectory import Trajectory

PREFIX_PASS_COST = 32
"""A shared prefix must save at least this many tokens of computation: a pass of its own has a price."""


@dataclass(frozen=True)
class MicroBatch:
    """The suffixes of some trajectories, packed: M tokens one after the other, n action tokens in them."""

    token_ids: Tensor
    """(M,) int64. The last action token of a trajectory is predicted, never fed."""
    positions: Tensor
    """(M,) int64: each token's position in its trajectory."""
    rows: Rows
    """Which of the M tokens are whose."""
    states: Tensor
    """(n,) int64: the packed index of the state that predicts each action token: the token before it."""
    index: Tensor
    """(n,) int64: each action token's place in the batch's flat order."""


@dataclass(frozen=True)
class PrefixGroup:
    prefix_ids: Tensor
    """(P,) int64; empty for trajectories that share nothing worth a pass."""
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class BatchPlan:
    """A whole batch of N action tokens. Flat order: trajectory after trajectory, in the order given."""

    groups: tuple[PrefixGroup, ...]
    action_ids: Tensor
    """(N,) int64"""
    temperatures: Tensor
    """(N,) float32"""

    @property
    def token_count(self) -> int:
        """N, what every loss is divided by: the action tokens of the whole batch, never of a micro-batch."""
        return self.action_ids.numel()


def plan_batch(
    trajectories: Sequence[Trajectory], tokens_per_micro_batch: int, *, share_prefixes: bool = True
) -> BatchPlan:
    """Lays out a batch. A micro-batch holds at most `tokens_per_micro_batch` suffix tokens, at least one suffix.

    Raises:
        ValueError: there are no trajectories.
    """
    if not trajectories:
        raise ValueError("a batch needs at least one trajectory")
    fed = [t.token_ids[: int(t.action_positions[-1])].tolist() for t in trajectories]
    limits = [int(t.action_positions[0]) - 1 for t in trajectories]
    offsets = torch.tensor([t.action_positions.numel() for t in trajectories]).cumsum(0).tolist()
    starts = [0, *offsets[:-1]]

    groups: list[PrefixGroup] = []
    alone: list[int] = []
    for members, length in _shared_prefixes(fed, limits) if share_prefixes else [([i], 0) for i in range(len(fed))]:
        if length == 0:
            alone += members
            continue
        micro_batches = _micro_batches(trajectories, fed, starts, members, length, tokens_per_micro_batch)
        groups.append(PrefixGroup(torch.tensor(fed[members[0]][:length]), micro_batches))
    if alone:
        micro_batches = _micro_batches(trajectories, fed, starts, alone, 0, tokens_per_micro_batch)
        groups.append(PrefixGroup(torch.empty(0, dtype=torch.int64), micro_batches))
    return BatchPlan(
        groups=tuple(groups),
        action_ids=torch.cat([t.token_ids[t.action_positions] for t in trajectories]),
        temperatures=torch.cat([t.temperatures for t in trajectories]),
    )


def _shared_prefixes(fed: Sequence[list[int]], limits: Sequence[int]) -> list[tuple[list[int], int]]:
    """Groups of trajectories and the length of the prefix each group shares (0: nothing worth sharing).

    A prefix ends at least one token before the first action token of every member (`limits`), so that the state that
    predicts it lies in the suffix. In lexicographic order trajectories with a common prefix are neighbours; dynamic
    programming over the order finds the cut into groups that saves the most tokens.
    """
    order = sorted(range(len(fed)), key=lambda i: fed[i])
    common = [_common_prefix(fed[a], fed[b]) for a, b in pairwise(order)]
    best = [0]  # best[j]: tokens saved among the first j of the order
    choice: list[tuple[int, int]] = []  # per j: start of the last group, its prefix length
    for end in range(1, len(order) + 1):
        saved, start, length = best[end - 1], end - 1, 0
        shared = limits[order[end - 1]]
        for begin in range(end - 2, -1, -1):
            shared = min(shared, common[begin], limits[order[begin]])
            if shared < 1:
                break
            gain = best[begin] + (end - 1 - begin) * shared - PREFIX_PASS_COST
            if gain > saved:
                saved, start, length = gain, begin, shared
        best.append(saved)
        choice.append((start, length))
    groups = []
    end = len(order)
    while end > 0:
        start, length = choice[end - 1]
        groups.append((sorted(order[start:end]), length))
        end = start
    return groups[::-1]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for length, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return length
    return min(len(a), len(b))


def _micro_batches(
    trajectories: Sequence[Trajectory],
    fed: Sequence[list[int]],
    starts: Sequence[int],
    members: Sequence[int],
    prefix: int,
    budget: int,
) -> tuple[MicroBatch, ...]:
    """Suffixes of similar length run together, so that little is padded where they are rows."""
    batches: list[list[int]] = []
    tokens = 0
    for member in sorted(members, key=lambda i: len(fed[i])):
        tokens += len(fed[member]) - prefix
        if not batches or tokens > budget:
            batches.append([])
            tokens = len(fed[member]) - prefix
        batches[-1].append(member)
    return tuple(_micro_batch(trajectories, fed, starts, batch, prefix) for batch in batches)


def _micro_batch(
    trajectories: Sequence[Trajectory],
    fed: Sequence[list[int]],
    starts: Sequence[int],
    members: Sequence[int],
    prefix: int,
) -> MicroBatch:
    suffixes = [torch.tensor(fed[i][prefix:]) for i in members]
    lengths = torch.tensor([len(suffix) for suffix in suffixes])
    begins = lengths.cumsum(0) - lengths
    width = int(lengths.max())
    column = torch.arange(width)
    present = column < lengths[:, None]
    positions = [trajectories[i].action_positions for i in members]
    return MicroBatch(
        token_ids=torch.cat(suffixes),
        positions=column.expand_as(present)[present] + prefix,
        rows=Rows(padded=(begins[:, None] + column) * present, unpadded=present.flatten().nonzero().squeeze(1)),
        states=torch.cat([p - 1 - prefix + begin for p, begin in zip(positions, begins, strict=True)]),
        index=torch.cat([torch.arange(p.numel()) + starts[i] for p, i in zip(positions, members, strict=True)]),
    )
