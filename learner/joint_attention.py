"""Attention over a shared prefix and a row's own tokens under one softmax, with its gradient written out.

Plain autograd would hold the scores three times and copy them as often; on a CPU that costs more than the products.
Here there is one buffer of weights, (kv heads, B * G * S, P + S) for G query heads per kv head, in which scores become
weights in place. With s = scaling * q k, w = softmax(s), o = w v the gradients are

    dv = w^T do      dw = do v^T      ds = w (dw - sum(w dw))      dq = scaling * ds k      dk = scaling * ds^T q
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def joint_attention(q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, scaling: float) -> Tensor:
    """Each token attends to the whole prefix and, causally, to its own row.

    q: (heads, B, S, D). k, v: (kv heads, B, S, D). prefix_k, prefix_v: (kv heads, P, D), one for all rows: neither
    they nor their gradients are ever expanded to B rows. Returns (heads, B, S, D) in q's dtype; computed in float32 or
    wider, under autocast too.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _JointAttention.apply(q, k, v, prefix_k, prefix_v, scaling)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, scaling: float
    ) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        heads, rows, length, _ = q.shape
        kv_heads, past = prefix_k.shape[:2]
        queries = _by_kv_head(q, kv_heads).to(dtype) * scaling
        own_k, own_v = (tensor.to(dtype).flatten(0, 1) for tensor in (k, v))  # (kv heads * B, S, D)
        past_k, past_v = prefix_k.to(dtype), prefix_v.to(dtype)

        weights = queries.new_empty(kv_heads, queries.shape[1], past + length)
        past_weights, own_weights = _parts(weights, rows, past)
        torch.bmm(queries, past_k.transpose(1, 2), out=past_weights)
        torch.bmm(_rows(queries, rows), own_k.transpose(1, 2), out=own_weights)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        own_weights.masked_fill_(future.repeat(heads // kv_heads, 1), float("-inf"))
        torch.softmax(weights, -1, out=weights)

        output = torch.bmm(past_weights, past_v)
        _rows(output, rows).baddbmm_(own_weights, own_v)
        ctx.save_for_backward(queries, own_k, own_v, past_k, past_v, weights)
        ctx.shape, ctx.scaling, ctx.dtypes = q.shape, scaling, [t.dtype for t in (q, k, v, prefix_k, prefix_v)]
        return _by_query_head(output, q.shape).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, own_k, own_v, past_k, past_v, weights = ctx.saved_tensors
        _, rows, length, dim = ctx.shape
        kv_heads, past = past_k.shape[:2]
        past_weights, own_weights = _parts(weights, rows, past)
        grad = _by_kv_head(grad, kv_heads).to(weights.dtype)

        grad_scores = torch.empty_like(weights)
        past_grad, own_grad = _parts(grad_scores, rows, past)
        torch.bmm(grad, past_v.transpose(1, 2), out=past_grad)
        torch.bmm(_rows(grad, rows), own_v.transpose(1, 2), out=own_grad)
        torch._softmax_backward_data(grad_scores, weights, -1, weights.dtype, grad_input=grad_scores)

        grad_queries = torch.bmm(past_grad, past_k)
        _rows(grad_queries, rows).baddbmm_(own_grad, own_k)
        own_shape = (kv_heads, rows, length, dim)
        grads = (
            _by_query_head(grad_queries.mul_(ctx.scaling), ctx.shape),
            torch.bmm(own_grad.transpose(1, 2), _rows(queries, rows)).view(own_shape),
            torch.bmm(own_weights.transpose(1, 2), _rows(grad, rows)).view(own_shape),
            torch.bmm(past_grad.transpose(1, 2), queries) if ctx.needs_input_grad[3] else None,
            torch.bmm(past_weights.transpose(1, 2), grad) if ctx.needs_input_grad[4] else None,
        )
        return *(g if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)), None


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """(heads, B, S, D) -> (kv heads, B * G * S, D): the G query heads of one kv head are neighbours."""
    heads, rows, length, dim = q.shape
    return q.view(kv_heads, heads // kv_heads, rows, length, dim).transpose(1, 2).reshape(kv_heads, -1, dim)


def _by_query_head(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_by_kv_head`; shape: (heads, B, S, D)."""
    heads, rows, length, dim = shape
    kv_heads = packed.shape[0]
    return packed.view(kv_heads, rows, heads // kv_heads, length, dim).transpose(1, 2).reshape(shape)


def _rows(packed: Tensor, rows: int) -> Tensor:
    """(kv heads, B * n, X) seen as (kv heads * B, n, X)."""
    return packed.view(packed.shape[0] * rows, -1, packed.shape[-1])


def _parts(weights: Tensor, rows: int, past: int) -> tuple[Tensor, Tensor]:
    """Views of the prefix's columns, all rows in one matrix per kv head, and of each row's own."""
    return weights[..., :past], _rows(weights, rows)[..., past:]
