"""One base model, one dtype, whichever process or machine asks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.policies.dtype import resolve_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_auto_is_the_dtype_of_the_files(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_dtype("auto", tmp_path) == expected


def test_a_named_dtype_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_dtype("float32", tmp_path) == "float32"
    assert resolve_dtype("bfloat16", tmp_path) == "bfloat16"


def test_a_directory_without_a_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        resolve_dtype("auto", tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_configuration_that_names_none_leaves_it_to_the_weights(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2, dtype=getattr(torch, dtype))}, tmp_path / "model.safetensors", {"format": "pt"})
    assert resolve_dtype("auto", tmp_path) == dtype
