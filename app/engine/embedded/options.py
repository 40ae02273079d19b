"""What the embedded engine is started with. Flags that vLLM has carry vLLM's names."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

BLOCK_SIZE = 16
"""Tokens per KV block; full blocks are what requests share."""


def default_threads() -> int:
    """Half of the cores: a learner computes on the same machine, and torch stalls on a core it must share."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(frozen=True)
class EngineOptions:
    model: Path
    """Directory in Hugging Face layout, tokenizer included."""
    served_model_name: str
    """The base model's id in requests and in /v1/models."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: int | None = None
    """Context limit in tokens; None = what the model and the KV budget allow."""
    kv_tokens: int = 16384
    """Tokens whose keys and values fit in memory, shared prefixes counted once."""
    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens of one forward pass; longer prompts are computed over several steps, so that running requests go on."""
    max_num_queued_reqs: int = 1024
    """Requests that wait beyond `max_num_seqs`; further ones are a 503."""
    max_loras: int = 8
    """Different adapters in one forward pass."""
    max_cpu_loras: int = 32
    """Adapters held in memory; the least recently used is read again from its path when it is needed."""
    max_lora_rank: int = 64
    threads: int = field(default_factory=default_threads)

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE
