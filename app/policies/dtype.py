"""Which dtype the base weights have, in engine and learner alike: both must sample and score with the same numbers."""

from typing import Literal

Dtype = Literal["bfloat16", "float32"]


def resolve_dtype(setting: Literal["auto", "bfloat16", "float32"]) -> Dtype:
    """The dtype for this machine; `auto` is bfloat16 where the hardware multiplies in it, else float32.

    Without such instructions (AVX512-BF16, AMX, a GPU) torch emulates bfloat16 on a CPU, several times slower
    than float32. torch is imported on the first call with `auto`, so that processes without it can import this module.
    """
    if setting != "auto":
        return setting
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"
