"""One frozen base model under two LoRA adapters: the policy, and the value model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from learner.adapters import adapter_parameters, load_adapter, policy_lora_config, save_adapter, value_lora_config
from learner.architecture import use_packed_attention
from learner.gradient_checkpointing import checkpoint_layers
from learner.model import LearnerModel, Role


class LoraModel(LearnerModel):
    """Adapter weights and the value head are float32; the base has the engine's dtype.

    With a bfloat16 base the adapters multiply in bfloat16 too, as they do in the engine: faster, and the learner's
    log-probs differ less from the behaviour's. Their master copies and the optimisers stay float32.
    """

    def __init__(self, base_model: Path, dtype: Dtype, settings: LearningSettings, policy: Path) -> None:
        """Loads the base and the adapter directory of a version; the value model starts from the base with V = 0.

        Raises:
            ValueError: the adapter does not fit the settings, or the model's architecture is not supported.
        """
        base = AutoModelForCausalLM.from_pretrained(base_model, dtype=getattr(torch, dtype), local_files_only=True)
        super().__init__(dtype, base.config.get_text_config().hidden_size)
        base.requires_grad_(False).eval().to(self.device)
        value_config = value_lora_config(settings, base)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.peft: PeftModel = get_peft_model(base, policy_lora_config(settings, base), adapter_name="policy")
            self.peft.add_adapter("value", value_config)
        load_adapter(self.peft, "policy", policy)
        self._causal_lm: PreTrainedModel = base  # with the adapters' layers in place
        self._decoder = base.get_decoder()
        if base.dtype != torch.float32:
            for layer in self.peft.modules():
                if isinstance(layer, LoraLayer):
                    layer.cast_input_dtype_enabled = False  # autocast casts the weights instead of the activations
        if settings.gradient_checkpointing:
            checkpoint_layers(self._decoder)
        with self._active("base"):
            use_packed_attention(base, lambda prompts, k: self.top_logprobs("base", prompts, k))

    @property
    def policy_parameters(self) -> dict[str, nn.Parameter]:
        return adapter_parameters(self.peft, "policy")

    @property
    def value_parameters(self) -> dict[str, nn.Parameter]:
        return adapter_parameters(self.peft, "value") | self._head_parameters()

    def served_policy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.policy_parameters.items()}

    def export_policy(self, directory: Path) -> None:
        """Writes the policy's adapter as a standard PEFT directory: factorised, float32, no modules_to_save."""
        save_adapter(self.peft, "policy", directory)

    @contextmanager
    def _active(self, role: Role) -> Iterator[None]:
        if role == "base":
            with self.peft.disable_adapter():
                yield
        else:
            self.peft.set_adapter(role)
            yield

    def _output_layer(self, role: Role) -> nn.Module:
        layer: nn.Module = self._causal_lm.get_output_embeddings()  # without an adapter: the base's is everybody's
        return layer
