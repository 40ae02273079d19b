"""Both contestants of the policy step get the batch that its shape names."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policy_step
from benchmarks.policy_step import SHAPES, batch, medians


def test_a_batch_by_hand() -> None:
    """Prompts of 10 tokens, 6 of them shared; 2 action tokens, an observation of 3, 1 action token."""
    one, other = batch(rollouts=2, prompt=10, common=6, turns=[(2, 3), (1, 0)])
    for trajectory in (one, other):
        assert trajectory.token_ids.shape == (16,)
        assert trajectory.action_positions.tolist() == [10, 11, 15]
        assert trajectory.rewards_to_come.tolist() == [1, 1, 1]
    assert torch.equal(one.token_ids[:6], other.token_ids[:6])
    assert not (one.token_ids[6:] == other.token_ids[6:]).any()
    assert (one.rollout_return, other.rollout_return) == (0.0, 1.0)


def test_the_shapes_are_those_that_they_are_called() -> None:
    lengths = {name: {t.token_ids.numel() for t in batch(**shape)} for name, shape in SHAPES.items()}
    assert lengths == {
        "128/32": {128 + 32},
        "1024/128 shared": {1024 + 128},
        "2048/32": {2048 + 32},
        "6 turns": {256 + 6 * 32 + 5 * 64},
    }


def process(shape: str, contestant: str, run: int, seconds: float, peak: float) -> dict[str, Any]:
    return {"shape": shape, "contestant": contestant, "run": run, "seconds": [seconds], "peak_mib": peak}


def test_medians_by_hand() -> None:
    measured = [process("128/32", "evergreen", run, s, p) for run, (s, p) in enumerate([(2, 10), (9, 90), (4, 20)])]
    measured += [process("128/32", "trl", run, s, p) for run, (s, p) in enumerate([(8, 50), (6, 40)])]
    measured.append(process("2048/32", "trl", 1, 1, 1))  # of another shape
    tokens = 8 * (128 + 32)
    assert medians("128/32", measured) == {
        "shape": "128/32",
        "tokens": tokens,
        "evergreen": {"runs": 3, "seconds": 4, "tokens_per_second": tokens / 4, "peak_mib": 20},
        "trl": {"runs": 2, "seconds": 7, "tokens_per_second": round(tokens / 7, 1), "peak_mib": 45},
        "speed_over_trl": 7 / 4,
        "peak_over_trl": round(20 / 45, 2),
    }


def test_a_run_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its third process of four; what two have measured is kept, and not measured again."""
    started: list[tuple[str, str]] = []

    def apart(contestant: str, shape: str, _dtype: str, _threads: int) -> dict[str, Any]:
        started.append((contestant, shape))
        if len(started) == 3:
            raise KeyboardInterrupt
        return {"seconds": [float(len(started))], "peak_mib": 1.0}

    out = tmp_path / "results" / "policy-step.json"
    monkeypatch.setattr(policy_step, "ensure_base_model", lambda _: tmp_path)
    monkeypatch.setattr(policy_step, "measure_apart", apart)
    options = ["--runs", "2", "--shapes", "6 turns", "--contestants", "evergreen", "update", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["policy_step", *options, "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        policy_step.main()
    policy_step.main()
    assert [contestant for contestant, _ in started] == ["evergreen", "update", "evergreen", "evergreen", "update"]
    result = json.loads(out.read_text())
    assert [(one["contestant"], one["run"]) for one in result["measured"]] == [
        ("evergreen", 1),
        ("update", 1),
        ("evergreen", 2),
        ("update", 2),
    ]
    assert result["medians"][0]["update"]["seconds"] == (2 + 5) / 2
    assert set(result["machine"]) == {"cpu", "cores", "flags", "memory_gib"}
    assert set(result["versions"]) == {"python", "torch", "transformers", "peft", "trl"}
    monkeypatch.setattr(policy_step, "machine", lambda: result["machine"] | {"cores": 64})
    with pytest.raises(SystemExit, match=r"machine\.cores was \d+ and is now 64"):
        policy_step.main()
    out.write_text("[]")  # as results were before they named their machine
    with pytest.raises(SystemExit, match="another --out"):
        policy_step.main()
