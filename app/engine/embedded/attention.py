"""Attention over KV that lies in blocks, for a forward pass whose rows belong to many requests.

The rows of a pass are packed without padding: (1, N) token ids of all requests. Linear layers see N rows; here every
request's rows attend to the keys and values of its own blocks. Registered with transformers' AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface), so its model code does the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from app.engine.embedded.options import BLOCK_SIZE

ATTENTION = "evergreen_blocks"


@dataclass(frozen=True)
class Rows:
    """The new rows of one request in a pass: tokens start ... start + count - 1 of its sequence."""

    start: int
    count: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Group:
    """R requests with at most Q new rows each over at most L keys, padded to one call of the attention kernel."""

    requests: int
    queries: int
    source: Tensor | None
    """(R * Q,) int64: the pass's row behind each query, padding repeats row 0; None: the pass's rows as they are."""
    real: Tensor | None
    """(rows,) int64: which of the R * Q queries are no padding; None: all."""
    target: Tensor | None
    """(rows,) int64: where their results go; None: the pass's rows as they are."""
    keys: Tensor
    """(R * L,) int64: slots of the keys and values."""
    mask: Tensor
    """(R, 1, Q, L), 0 or -inf."""


class KvPass:
    """The KV memory with one forward pass's layout; handed to every attention layer as a keyword argument."""

    def __init__(self, memory: "KvMemory", rows: Sequence[Rows], dtype: torch.dtype):
        self._memory = memory
        self._slots = torch.cat([_slots(r.blocks, r.start, r.end) for r in rows])
        self._count = self._slots.numel()
        offsets = [0]
        for r in rows:
            offsets.append(offsets[-1] + r.count)
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, r in enumerate(rows):
            # padding at most doubles a side, so one long prompt does not inflate the others
            buckets.setdefault((r.count.bit_length(), max(r.end, 64).bit_length()), []).append(index)
        alone = len(buckets) == 1
        self._groups = [_group([rows[i] for i in b], [offsets[i] for i in b], alone, dtype) for b in buckets.values()]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query (N, H, D), key and value (N, K, D) -> (N, H, D). K divides H: grouped-query attention."""
        keys, values = self._memory.layer(layer, key)
        # written before anything is read: rows may share blocks that this very pass fills
        keys[self._slots] = key
        values[self._slots] = value
        if len(self._groups) == 1 and self._groups[0].source is None:
            return _attend(self._groups[0], query, keys, values, scaling)
        result = torch.empty_like(query)
        for group in self._groups:
            attended = _attend(group, query[group.source], keys, values, scaling)
            result[group.target] = attended if group.real is None else attended[group.real]
        return result


class KvMemory:
    """Keys and values of all layers, in slots: block b holds slots b * BLOCK_SIZE onwards. Layers appear when used."""

    def __init__(self, num_blocks: int):
        self._num_slots = (num_blocks + 1) * BLOCK_SIZE
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(slots, K, D) keys and values."""
        if index not in self._layers:
            shape = (self._num_slots, *like.shape[1:])
            self._layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[index]


def _slots(blocks: Sequence[int], start: int, end: int) -> Tensor:
    """(end - start,) int64: where tokens start ... end - 1 of a sequence lie."""
    first, last = start // BLOCK_SIZE, -(-end // BLOCK_SIZE)
    base = torch.tensor(blocks[first:last], dtype=torch.int64)[:, None] * BLOCK_SIZE
    slots = (base + torch.arange(BLOCK_SIZE)).flatten()
    return slots[start - first * BLOCK_SIZE : end - first * BLOCK_SIZE]


def _group(rows: Sequence[Rows], offsets: Sequence[int], alone: bool, dtype: torch.dtype) -> _Group:
    queries, length = max(r.count for r in rows), max(r.end for r in rows)
    keys = torch.zeros(len(rows), length, dtype=torch.int64)
    position = torch.zeros(len(rows), queries, dtype=torch.int64)
    source = torch.zeros(len(rows), queries, dtype=torch.int64)
    real = torch.zeros(len(rows), queries, dtype=torch.bool)
    for i, (r, offset) in enumerate(zip(rows, offsets, strict=True)):
        keys[i, : r.end] = _slots(r.blocks, 0, r.end)
        position[i, : r.count] = torch.arange(r.start, r.end)
        source[i, : r.count] = torch.arange(offset, offset + r.count)
        real[i, : r.count] = True
    # a query sees the keys up to its own position; a padding query (position 0) sees the first, and nobody reads it
    seen = torch.arange(length) <= position[:, :, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]
    flat, padded = source.flatten(), not bool(real.all())
    chosen = real.flatten().nonzero().flatten() if padded else None
    return _Group(
        requests=len(rows),
        queries=queries,
        source=None if alone and not padded else flat,
        real=chosen,
        target=None if alone and not padded else (flat if chosen is None else flat[chosen]),
        keys=keys.flatten(),
        mask=mask,
    )


def _attend(group: _Group, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """query (R * Q, H, D) -> (R * Q, H, D)."""
    heads, width = query.shape[1:]
    kv_heads = keys.shape[1]
    shape = (group.requests, -1, kv_heads, width)
    k = keys.index_select(0, group.keys).view(shape).transpose(1, 2)
    v = values.index_select(0, group.keys).view(shape).transpose(1, 2)
    if group.queries == 1:
        # one token each: the heads that share keys become the queries, which the kernel does several times faster
        q = query.reshape(group.requests, kv_heads, heads // kv_heads, width)
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        return out.reshape(group.requests, heads, width)
    q = query.reshape(group.requests, group.queries, heads, width).transpose(1, 2)
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).reshape(group.requests * group.queries, heads, width)


_CHANGES_THE_NUMBERS = ("sliding_window", "softcap", "s_aux", "position_bias")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: KvPass,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    unknown = [name for name in _CHANGES_THE_NUMBERS if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"this model's attention uses {', '.join(unknown)}, which the embedded engine lacks: use vLLM")
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return kv.attend(layer, q, k, v, scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)
