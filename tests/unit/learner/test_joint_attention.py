"""Joint attention against torch's own, on keys and values that are expanded to every row."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from learner.joint_attention import joint_attention

HEADS, KV_HEADS, ROWS, LENGTH, PAST, DIM = 6, 2, 3, 4, 5, 8


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (HEADS, ROWS, LENGTH, DIM),
        (KV_HEADS, ROWS, LENGTH, DIM),
        (KV_HEADS, ROWS, LENGTH, DIM),
        (KV_HEADS, PAST, DIM),
        (KV_HEADS, PAST, DIM),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def expanded(q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor) -> Tensor:
    keys, values = (
        torch.cat([prefix.unsqueeze(1).expand(-1, ROWS, -1, -1), own], dim=2).repeat_interleave(HEADS // KV_HEADS, 0)
        for prefix, own in ((prefix_k, k), (prefix_v, v))
    )
    mask = torch.ones(LENGTH, PAST + LENGTH, dtype=torch.bool).tril(PAST)
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)


def test_output_and_gradients_are_those_of_expanded_keys_and_values() -> None:
    inputs = tensors(torch.float64)
    output, expected = joint_attention(*inputs, 0.3), expanded(*inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = torch.autograd.grad(output, inputs, weight)
    for gradient, of_expanded in zip(actual, torch.autograd.grad(expected, inputs, weight), strict=True):
        torch.testing.assert_close(gradient, of_expanded, rtol=0, atol=1e-12)


def test_bfloat16_is_rounded_once_at_the_end() -> None:
    inputs = tensors(torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    output, expected = joint_attention(*inputs, 0.3), expanded(*exact)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16(), rtol=2**-8, atol=0)
    weight = torch.ones_like(output)
    for gradient, of_exact in zip(
        torch.autograd.grad(output, inputs, weight), torch.autograd.grad(expected, exact, weight.double()), strict=True
    ):
        torch.testing.assert_close(gradient, of_exact.bfloat16(), rtol=2**-7, atol=2**-9)


def test_under_autocast_it_computes_in_float32() -> None:
    inputs = tensors(torch.float32)
    plain = joint_attention(*inputs, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(joint_attention(*inputs, 0.3), plain, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [3, 4])
def test_a_prefix_without_gradient_gets_none(frozen: int) -> None:
    inputs = tensors(torch.float64)
    inputs[frozen].requires_grad_(False)
    joint_attention(*inputs, 0.3).sum().backward()
    assert [t.grad is None for t in inputs] == [i == frozen for i in range(5)]
