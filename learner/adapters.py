"""LoRA adapters: what they are put on, and PEFT directories, the form that engines load and plain peft reads back."""

import json
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from app.policies.learning import LearningSettings

MLP_BLOCKS = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe"})
"""Names under which decoder families hold the block that the value model trains."""

MATRICES = ("lora_A", "lora_B")


def policy_lora_config(settings: LearningSettings, base: PreTrainedModel) -> LoraConfig:
    """LoRA on every linear layer but the output layer, named by suffix as engines expect it."""
    output = base.get_output_embeddings()
    targets = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name_or_path,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=sorted(targets),
    )


def value_lora_config(settings: LearningSettings, base: nn.Module) -> LoraConfig:
    """LoRA on the MLP projections alone: the value model's attention parameters stay frozen (arXiv 2607.07508).

    Raises:
        ValueError: the model has no linear layer inside a block of a known name, so nothing would train.
    """
    targets = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and not MLP_BLOCKS.isdisjoint(name.split("."))
    ]
    if not targets:
        raise ValueError(
            f"{type(base).__name__} has no linear layer inside a block named {', '.join(sorted(MLP_BLOCKS))}: "
            "the value adapter would train nothing"
        )
    return LoraConfig(
        task_type="CAUSAL_LM", r=settings.value_rank, lora_alpha=settings.lora_alpha, target_modules=targets
    )


def save_adapter(model: PeftModel, adapter: str, directory: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors (float32) of one adapter into `directory`."""
    config = model.peft_config[adapter]
    weights = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / SAFETENSORS_WEIGHTS_NAME)
    was_inference = config.inference_mode
    config.inference_mode = True  # whoever loads it serves it
    config.save_pretrained(str(directory))
    config.inference_mode = was_inference
    path = directory / CONFIG_NAME
    saved = json.loads(path.read_text())
    # peft keeps them as a set: their order, and with it the version's hash, would be another in every process
    saved["target_modules"] = sorted(saved["target_modules"])
    path.write_text(json.dumps(saved, indent=2, sort_keys=True))


def load_adapter(model: PeftModel, adapter: str, directory: Path) -> None:
    """Copies a saved adapter's weights into the adapter of the same shape that `model` has already.

    Raises:
        ValueError: the names or shapes on disk are not those of the adapter.
    """
    weights = load_file(directory / SAFETENSORS_WEIGHTS_NAME)
    expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in expected.items()}:
        raise ValueError(f"{directory} holds another adapter than the policy's settings describe (rank or layers)")
    set_peft_model_state_dict(model, weights, adapter_name=adapter)


def adapter_parameters(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """Name -> matrix of one adapter. A layer of the base model may have an adapter's name: `value`, say."""
    ends = tuple(f".{matrix}.{adapter}.weight" for matrix in MATRICES)
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(ends)}


def without_adapter(name: str, adapter: str) -> str:
    """A parameter's name as in PEFT's files, which do not hold the adapter's own; other names stay."""
    for matrix in MATRICES:
        end = f".{matrix}.{adapter}.weight"
        if name.endswith(end):
            return f"{name.removesuffix(end)}.{matrix}.weight"
    return name
