"""A complete model directory in Hugging Face layout, which engines and plain transformers load."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

COPIED = (".json", ".jinja", ".model", ".txt")
"""Suffixes of what a tokenizer, its chat template and a generation configuration are kept in."""


def save_model(model: PreTrainedModel, base_model: Path, directory: Path) -> None:
    """Writes config.json and model.safetensors, in the dtype of `model`, and copies the rest from its base model.

    (Above 50 GB transformers writes several files and an index.)
    """
    for path in base_model.iterdir():
        if path.suffix in COPIED and path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
    model.save_pretrained(directory)
    given = base_model / "generation_config.json"
    if given.is_file():  # as it was given: transformers adds to it
        shutil.copyfile(given, directory / given.name)
