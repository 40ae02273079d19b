"""Attention of packed suffixes on a shared prefix.

All suffixes of a micro-batch run through the model's linear layers as one packed sequence, without padding. Only here
are they rows: each token attends to the shared prefix, whose keys and values exist once whatever the number of rows,
and to the earlier tokens of its own row.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from learner.joint_attention import joint_attention

PACKED_ATTENTION = "evergreen_packed"
MAX_SCORES = 2**26
"""Attention scores held at once (256 MiB in float32); with more, keys and values are expanded and fused instead."""


@dataclass(frozen=True)
class Rows:
    """How M packed tokens are B rows of at most S."""

    padded: Tensor
    """(B, S) int64: the packed index of each row's tokens; 0 where there is none."""
    unpadded: Tensor
    """(M,) int64: each packed token's index in the flattened (B * S)."""

    def to(self, device: torch.device) -> "Rows":
        return Rows(self.padded.to(device), self.unpadded.to(device))


@dataclass
class PrefixKv:
    """Per layer, keys and values of a prefix: (kv heads, P, head dim)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def all(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.keys, self.values


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    rows: Rows | None,
    prefix: PrefixKv | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers' `AttentionInterface`; `rows` and `prefix` come as model arguments.

    query: (1, heads, M, D). key, value: (1, kv heads, M, D). With `rows`, M packed suffix tokens on top of `prefix`
    (None: nothing before them). Without, the M tokens are a prefix themselves, and `prefix` records their keys and
    values. Returns (1, M, heads, D). Everything is causal; there is no padding to mask.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if rows is None:
        if prefix is not None and len(prefix.keys) == layer:  # not when gradient checkpointing computes it again
            prefix.keys.append(key[0])
            prefix.values.append(value[0])
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None

    q, k, v = (tensor[0][:, rows.padded] for tensor in (query, key, value))  # (heads or kv heads, B, S, D)
    if prefix is None:
        output = _fused(q, k, v, None, scaling)
    else:
        prefix_k, prefix_v = prefix.keys[layer], prefix.values[layer]
        scores = q.shape[:3].numel() * (prefix_k.shape[1] + q.shape[2])
        if scores <= MAX_SCORES:
            output = joint_attention(q, k, v, prefix_k, prefix_v, scaling)
        else:
            batch = q.shape[1]
            k = torch.cat([prefix_k.unsqueeze(1).expand(-1, batch, -1, -1), k], dim=2)
            v = torch.cat([prefix_v.unsqueeze(1).expand(-1, batch, -1, -1), v], dim=2)
            output = _fused(q, k, v, prefix_k.shape[1], scaling)
    return output.flatten(1, 2)[:, rows.unpadded].transpose(0, 1).unsqueeze(0), None


def _fused(q: Tensor, k: Tensor, v: Tensor, prefix_length: int | None, scaling: float) -> Tensor:
    """torch's fused kernels, which hold no scores; keys and values begin with the prefix's in every row."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    mask = None
    if prefix_length is not None:
        length = q.shape[2]
        mask = torch.ones(length, prefix_length + length, dtype=torch.bool, device=q.device).tril(prefix_length)
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(0, 1)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
