"""The stability benchmark does what it says: stale rollouts, a task that moves, the last window against the best."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from app.policies.learning import LearningSettings
from benchmarks.stability import ARMS, COLUMNS, MAX_STALENESS, Run, main, stability


def test_the_last_window_against_the_best() -> None:
    """By hand: windows of 100 end at 1.0 after the hundredth update and at 0.5 after the last."""
    assert stability([1.0] * 100 + [0.5] * 100) == {"last_100": 0.5, "best_100": 1.0, "share": 0.5}


def test_a_run_shorter_than_a_window_is_one() -> None:
    assert stability([0.0, 1.0]) == {"last_100": 0.5, "best_100": 0.5, "share": 1.0}


@pytest.mark.parametrize("arm", ARMS)
def test_rollouts_are_up_to_four_updates_old_and_the_task_moves(arm: str, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    settings = LearningSettings.model_validate(ARMS[arm] | {"critic_warmup_updates": 0})
    with path.open("w", newline="") as file:
        run = Run(1, settings, 3, csv.DictWriter(file, COLUMNS))
        rewards = run.play(6)
    rows = list(csv.DictReader(path.open(newline="")))
    assert [float(row["reward"]) for row in rows] == [pytest.approx(reward, rel=1e-3) for reward in rewards]
    assert [row["phase"] for row in rows] == ["1", "1", "1", "2", "2", "2"]
    assert run.classes == [1, 2, 3, 0]
    # drawn from 0 to what there is: never more than four, and about two on average once there are five versions
    assert float(rows[0]["staleness"]) == 0
    assert 1 < float(rows[-1]["staleness"]) < 3
    assert len(run.versions) == MAX_STALENESS + 1
    # each version is another one
    assert all((one[0] != other[0]).any() for one, other in zip(run.versions, list(run.versions)[1:], strict=False))


def test_a_result_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*options: str) -> None:
        common = ["stability", "--arms", "sao", "--seeds", "1", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [*common, *options])
        # modes of this whole process, which other tests' floats would feel
        monkeypatch.setattr(torch, "set_flush_denormal", lambda _: True)
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
        main()

    run("--updates", "2")
    path = tmp_path / "sao-seed-1.json"
    first = path.read_text()
    run("--updates", "2")  # done already
    with pytest.raises(SystemExit, match="updates was 2 and is now 3"):
        run("--updates", "3")
    with pytest.raises(SystemExit, match=r"settings\.policy_lr was .*settings\.value_lr was "):
        run("--updates", "2", "--lr-scale", "1")
    assert path.read_text() == first
    there = json.loads(first)
    del there["settings"]["truncation"]  # as of a release that did not have it
    path.write_text(json.dumps(there))
    with pytest.raises(SystemExit, match=r"settings\.truncation was not recorded"):
        run("--updates", "2")
