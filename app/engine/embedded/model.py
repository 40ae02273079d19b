"""A transformers causal language model that runs packed rows of many requests, under many adapters, in one pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from app.engine.embedded.adapters import Adapter
from app.engine.embedded.attention import ATTENTION, KvMemory, KvPass, Rows
from app.engine.embedded.lora import LoraBatch, wrap_linear_layers
from app.engine.embedded.options import BLOCK_SIZE, EngineOptions
from app.engine.embedded.weights import read_weights

_DEPENDS_ON_THE_BATCH = ("dynamic", "longrope")
"""Rotary embeddings that look at the longest position of a pass would mix requests."""


class PackedModel:
    """The base weights, their linear layers open to adapters, and the KV memory."""

    def __init__(self, options: EngineOptions):
        config: Any = AutoConfig.from_pretrained(options.model)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in _DEPENDS_ON_THE_BATCH:
            raise ValueError(f"the embedded engine cannot serve rope_type {rope['rope_type']!r}: use vLLM")
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=self.dtype, attn_implementation=ATTENTION
        ).eval()
        self.vocabulary: int = config.vocab_size
        self.eos_token_ids = _as_set(self._model.generation_config.eos_token_id)
        self.max_model_len = min(
            length
            for length in (config.max_position_embeddings, options.max_model_len, options.num_blocks * BLOCK_SIZE)
            if length is not None
        )
        head = self._model.get_output_embeddings()
        head_name = next(name for name, module in self._model.named_modules() if module is head)
        self._weights: dict[str, Tensor] = self._model.state_dict()
        """By the checkpoint's names, which the wrapped layers no longer have."""
        self._batch = LoraBatch([])
        self.linear_layers = wrap_linear_layers(self._model, head, self._batch)
        float_head = _Float32Head(head)
        self._model.set_output_embeddings(float_head)
        self._weights |= {f"{head_name}.{name}": buffer for name, buffer in float_head.named_buffers()}
        self._memory = KvMemory(options.num_blocks)
        # allocates the KV memory of every layer, and fails here if the architecture does something unknown
        self.forward([0], [Rows(0, 1, [0])], [None], [0])

    @torch.no_grad()
    def reload_weights(self, directory: Path) -> None:
        """Copies the weights of a model directory of the same shape over the present ones.

        Raises:
            WeightsUnsupported: it is another model, or cannot be read; nothing has been copied then.
        """
        shapes = {name: weight.shape for name, weight in self._weights.items()}
        for name, weight in read_weights(directory, shapes, self.dtype).items():
            self._weights[name].copy_(weight)

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], rows: Sequence[Rows], adapters: Sequence[Adapter | None], wanted: Sequence[int]
    ) -> Tensor:
        """One pass. token_ids: the new tokens of all requests, request after request, equal adapters together.

        rows and adapters: one per request. wanted: rows of the pass whose logits are needed (computing the others'
        would cost more than the rest of a small model). Returns (len(wanted), V) float32.
        """
        self._batch.segments = _segments(rows, adapters)
        positions = torch.cat([torch.arange(r.start, r.end) for r in rows])
        output = self._model(
            input_ids=torch.tensor(token_ids)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64),
            kv=KvPass(self._memory, rows, self.dtype),
        )
        logits: Tensor = output.logits[0]
        return logits


class _Float32Head(nn.Module):
    """The output layer in float32, whatever the model's dtype: a logit of 20 in bfloat16 is rounded by up to 0.06."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", head.weight.detach().float(), persistent=False)
        self.register_buffer("bias", None if head.bias is None else head.bias.detach().float(), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states.float(), self.weight, self.bias)


def _segments(rows: Sequence[Rows], adapters: Sequence[Adapter | None]) -> list[tuple[int, int, Adapter]]:
    """Runs of rows under one adapter."""
    segments: list[tuple[int, int, Adapter]] = []
    start = 0
    for r, adapter in zip(rows, adapters, strict=True):
        end = start + r.count
        if adapter is not None:
            if segments and segments[-1][2] is adapter and segments[-1][1] == start:
                segments[-1] = (segments[-1][0], end, adapter)
            else:
                segments.append((start, end, adapter))
        start = end
    return segments


def _as_set(token_ids: int | list[int] | None) -> frozenset[int]:
    if token_ids is None:
        return frozenset()
    return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
