"""The weights of a model directory, all of them or none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM


class WeightsUnsupported(Exception):
    """The directory's weights cannot take the place of those that are served; the message says why."""


def read_weights(directory: Path, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a directory in Hugging Face layout, by name, in `dtype`.

    Not to be called beside a forward pass: transformers changes torch's default dtype for the whole process meanwhile.

    Args:
        shapes: of the model that is served.

    Raises:
        WeightsUnsupported: the directory does not hold exactly these names and shapes.
    """
    if not (directory / "config.json").is_file():
        raise WeightsUnsupported(
            f"{directory} holds no config.json: it is no model directory that this engine can read"
        )
    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it never gave a report
    try:
        model, report = load(directory, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise WeightsUnsupported(f"{directory} cannot be loaded: {error}") from error
    # transformers fills what a file lacks with random numbers, and says so only here
    missing = sorted(report["missing_keys"])
    if missing:
        raise WeightsUnsupported(f"{directory} lacks the weights {', '.join(missing[:5])}")
    weights: dict[str, Tensor] = model.state_dict()
    different = sorted(
        name
        for name in shapes.keys() | weights.keys()
        if name not in weights or name not in shapes or weights[name].shape != shapes[name]
    )
    if different:
        raise WeightsUnsupported(f"{directory} is another model: it differs in {', '.join(different[:5])}")
    return weights
