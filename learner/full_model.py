"""A policy and a value model that are trained in all their weights, each a model of its own."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.architecture import use_packed_attention
from learner.attention import PACKED_ATTENTION
from learner.gradient_checkpointing import checkpoint_layers
from learner.master_weights import MasterWeights
from learner.model import LearnerModel, Role
from learner.model_files import save_model

ATTENTION_BLOCKS = frozenset({"self_attn", "attn", "attention", "self_attention"})
"""Names under which decoder families hold the block that the value model does not train."""


class FullModel(LearnerModel):
    """Masters and the value head are float32; what multiplies has the engine's dtype (docs/learning.md says what that
    takes).

    The value model is a decoder that starts from the base; its attention parameters stay frozen (arXiv 2607.07508).
    The frozen base itself is held only where the anchor needs it, in the engine's dtype and with an output layer of its
    own: the policy's has moved, all the more where it is the embedding too.
    """

    def __init__(self, base_model: Path, dtype: Dtype, settings: LearningSettings, policy: Path) -> None:
        """Loads the base and the model directory of a version; the value model starts from the base with V = 0.

        Raises:
            ValueError: the model's architecture is not supported.
        """
        self._base_model = base_model
        model = _load(policy, dtype)
        super().__init__(dtype, model.config.get_text_config().hidden_size)
        self._policy: PreTrainedModel = model.to(self.device)
        self._policy_masters = MasterWeights(self._policy)
        use_packed_attention(self._policy, lambda prompts, k: self.top_logprobs("policy", prompts, k))

        self._value: nn.Module = _load(base_model, dtype).get_decoder().to(self.device)
        self._value.config._attn_implementation = PACKED_ATTENTION
        freeze(self._value, ATTENTION_BLOCKS)  # before there are masters: what is frozen has none, and no optimiser
        self._value_masters = MasterWeights(self._value)

        self._base: PreTrainedModel | None = None
        if settings.anchor_coefficient > 0:
            base = _load(base_model, dtype).requires_grad_(False).to(self.device)
            base.config._attn_implementation = PACKED_ATTENTION
            self._base = base
        if settings.gradient_checkpointing:
            checkpoint_layers(self._policy.get_decoder())
            checkpoint_layers(self._value)

    @property
    def policy_parameters(self) -> dict[str, nn.Parameter]:
        return self._policy_masters.parameters

    @property
    def value_parameters(self) -> dict[str, nn.Parameter]:
        decoder = {f"value.{name}": parameter for name, parameter in self._value_masters.parameters.items()}
        return decoder | self._head_parameters()

    def served_policy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self._policy_masters.round().items()}

    def export_policy(self, directory: Path) -> None:
        """Writes a complete Hugging Face model directory, its weights in the engine's dtype."""
        self._policy_masters.round()
        save_model(self._policy, self._base_model, directory)

    @contextmanager
    def _active(self, role: Role) -> Iterator[None]:
        if role == "value":
            self._value_masters.round()
            self._decoder = self._value
        elif role == "policy":
            self._policy_masters.round()
            self._decoder = self._policy.get_decoder()
        else:
            self._decoder = self._frozen_base().get_decoder()
        yield

    def _output_layer(self, role: Role) -> nn.Module:
        model = self._frozen_base() if role == "base" else self._policy
        layer: nn.Module = model.get_output_embeddings()
        return layer

    def _frozen_base(self) -> PreTrainedModel:
        if self._base is None:
            raise ValueError("the base is held only for the anchor, and anchor_coefficient is 0")
        return self._base


def freeze(module: nn.Module, blocks: Collection[str]) -> list[str]:
    """Takes the parameters inside a block of one of these names out of training; returns their names.

    Raises:
        ValueError: there is no such block: everything would train, unnoticed.
    """
    frozen = [name for name, _ in module.named_parameters() if not set(blocks).isdisjoint(name.split("."))]
    if not frozen:
        raise ValueError(
            f"{type(module).__name__} has no parameter inside a block named {', '.join(sorted(blocks))}: "
            "nothing of it would be frozen"
        )
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    return frozen


def _load(directory: Path, dtype: Dtype) -> Any:
    """A causal language model on the CPU."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True).eval()
