"""What an untrained model earns is kept: every reward, where it was measured, and not measured twice."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.untrained import main, phase_result
from tests.contract.tiny_model import build_base_model
from tests.tiny_tokenizer import SMOLLM2_TEMPLATE


def test_a_phase_by_hand() -> None:
    result = phase_result([(["a"], 1.0), (["a", "b"], 0.5), (["a"], 0.0), (["a"], 0.0)], 2.0)
    assert result == {
        "rollouts": 4,
        "success": 0.5,
        "success_standard_error": 0.25,  # sqrt(0.5 * 0.5 / 4)
        "mean_reward": 0.375,
        "seconds": 2.0,
        "rewards": [1.0, 0.5, 0.0, 0.0],
        "turns": [1, 2, 1, 1],
    }


def test_phases_are_written_with_machine_and_versions_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_base_model(tmp_path / "model", context=2048)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.save_pretrained(model)

    def run(*options: str) -> None:
        common = ["untrained", "tickets", "--model", str(model), "--batch", "2", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*common, *options])
        main()

    run("--samples", "3", "--phases", "2")
    path = tmp_path / "tickets-seed-1.json"
    first = json.loads(path.read_text())
    assert first["machine"]["cores"] >= 1
    assert first["versions"]["torch"]
    assert list(first["phases"]) == ["2"]
    assert len(first["phases"]["2"]["rewards"]) == 3
    assert str(tmp_path) not in path.read_text()
    run("--samples", "3", "--phases", "1", "2")
    both = json.loads(path.read_text())
    assert both["phases"]["2"] == first["phases"]["2"]  # its seconds too: it was not played again
    assert sorted(both["phases"]) == ["1", "2"]
    with pytest.raises(SystemExit, match="samples was 3 and is now 4"):
        run("--samples", "4")
