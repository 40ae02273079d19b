"""Which dtype this machine multiplies faster in, found by multiplying."""

import time

import torch

from app.policies.dtype import Dtype

ROWS, INNER, OUTPUTS = 1024, 576, 1536
"""A micro-batch of tokens through an MLP layer of the default model."""
ROUNDS, PRODUCTS = 5, 8


def faster_dtype() -> Dtype:
    """The dtype whose matrix products of a typical size take less time; some hundred milliseconds on a CPU.

    Measured because a CPU's flags do not tell: with AVX512-BF16 and no AMX a product of the default model ran at
    163 GFLOPS in bfloat16 and 310 in float32 on one machine, and at 774 and 192 on another (2 cores each).
    """
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    operands = {
        dtype: (torch.ones(ROWS, INNER, dtype=dtype), torch.ones(INNER, OUTPUTS, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    }
    best = dict.fromkeys(operands, float("inf"))
    for _ in range(ROUNDS):  # in turns, and the best of each: what else the machine does falls out
        for dtype, (left, right) in operands.items():
            best[dtype] = min(best[dtype], seconds_of(left, right))
    return "bfloat16" if best[torch.bfloat16] < best[torch.float32] else "float32"


def seconds_of(left: torch.Tensor, right: torch.Tensor) -> float:
    """Wall-clock seconds of PRODUCTS matrix products."""
    started = time.perf_counter()
    for _ in range(PRODUCTS):
        left @ right
    return time.perf_counter() - started
