"""How a batch is laid out for the model: which trajectories share a prompt prefix, and which rows run together.

A prefix that several trajectories share is computed once for all of them; what is left of each, its suffix, runs in
right-padded micro-batches on top of the prefix's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from learner.trajectory import Trajectory

PREFIX_PASS_COST = 32
"""A shared prefix must save at least this many tokens of computation: a pass of its own has a price."""


@dataclass(frozen=True)
class MicroBatch:
    """B suffixes, right-padded to S tokens, with n action tokens in them."""

    token_ids: Tensor
    """(B, S) int64; 0 where padded. The last action token of a trajectory is predicted, never fed."""
    attention_mask: Tensor
    """(B, P + S) int64: 1 on the P prefix tokens and on the suffix, 0 on padding."""
    rows: Tensor
    """(n,) int64: the row of the state that predicts each action token ..."""
    columns: Tensor
    """(n,) int64: ... and its column in the suffix: the position before the action token."""
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
    """Lays out a batch. A micro-batch holds at most `tokens_per_micro_batch` padded suffix tokens, at least one row.

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
    """Rows of similar length run together, so that little is padded."""
    rows_of: list[list[int]] = []
    for member in sorted(members, key=lambda i: len(fed[i])):
        width = len(fed[member]) - prefix  # ascending: the newest row is the widest
        if rows_of and (len(rows_of[-1]) + 1) * width <= budget:
            rows_of[-1].append(member)
        else:
            rows_of.append([member])
    return tuple(_micro_batch(trajectories, fed, starts, rows, prefix) for rows in rows_of)


def _micro_batch(
    trajectories: Sequence[Trajectory],
    fed: Sequence[list[int]],
    starts: Sequence[int],
    members: Sequence[int],
    prefix: int,
) -> MicroBatch:
    width = max(len(fed[i]) for i in members) - prefix
    token_ids = torch.zeros(len(members), width, dtype=torch.int64)
    attention_mask = torch.ones(len(members), prefix + width, dtype=torch.int64)
    rows, columns, index = [], [], []
    for row, i in enumerate(members):
        suffix = fed[i][prefix:]
        token_ids[row, : len(suffix)] = torch.tensor(suffix)
        attention_mask[row, prefix + len(suffix) :] = 0
        positions = trajectories[i].action_positions
        rows.append(torch.full_like(positions, row))
        columns.append(positions - 1 - prefix)
        index.append(torch.arange(positions.numel()) + starts[i])
    return MicroBatch(token_ids, attention_mask, torch.cat(rows), torch.cat(columns), torch.cat(index))
