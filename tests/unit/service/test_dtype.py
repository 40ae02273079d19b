"""One base model, one dtype, whichever process or machine asks."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.policies.dtype import resolve_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
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
