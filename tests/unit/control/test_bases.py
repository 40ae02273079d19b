"""Whether an engine's base model is a policy's."""

from pathlib import Path

import pytest

from app.policies.bases import is_same_base


def test_directories_are_compared_where_they_lead(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "twin").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    assert is_same_base(str(tmp_path / "link"), str(tmp_path / "model"))
    assert is_same_base(f"{tmp_path}/model/", str(tmp_path / "model"))
    assert not is_same_base(str(tmp_path / "twin"), str(tmp_path / "model"))
    assert not is_same_base("/a/model", "/b/model")


@pytest.mark.parametrize(
    ("directory", "same"),
    [
        ("/home/models/HuggingFaceTB--SmolLM2-360M", True),
        ("/mnt/SmolLM2-360M", True),
        ("/root/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-360M/snapshots/0a1b2c", True),
        ("/mnt/SmolLM2-135M", False),
    ],
)
def test_a_hub_name_is_compared_by_name(directory: str, same: bool) -> None:
    assert is_same_base("HuggingFaceTB/SmolLM2-360M", directory) is same


def test_an_engine_that_has_not_said_is_given_the_benefit_of_the_doubt() -> None:
    assert is_same_base(None, "/base")
