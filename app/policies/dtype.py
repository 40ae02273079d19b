"""Which dtype the base weights have, in engine and learner alike: both must sample and score with the same numbers."""

from typing import Literal

Dtype = Literal["bfloat16", "float32"]


def resolve_dtype(setting: Literal["auto", "bfloat16", "float32"]) -> Dtype:
    """The dtype for this machine; `auto` is bfloat16 where the hardware multiplies faster in it, else float32.

    On CPUs that is AMX alone. With nothing but AVX512-BF16 a matrix product of the default model runs at 163 GFLOPS in
    bfloat16 and 310 in float32 (2 cores, measured); without either, torch emulates bfloat16 and is slower still. torch
    is imported on the first call with `auto`, so that processes without it can import this module.
    """
    if setting != "auto":
        return setting
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "float32"
