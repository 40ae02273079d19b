"""Figures of an experiment's report, against values worked out by hand."""

import csv
from pathlib import Path

import pytest

from evergreen.experiment_report import PhaseResult, phase_results, summary_rows, write_report
from evergreen.experiment_runs import read_run


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def write_run(directory: Path, rewards: dict[int, list[float]]) -> None:
    played = [(phase, reward) for phase, of_phase in rewards.items() for reward in of_phase]
    rows: list[dict[str, object]] = [
        {"index": n, "phase": phase, "reward": reward} for n, (phase, reward) in enumerate(played)
    ]
    write(directory / "played" / "rollouts.csv", rows[::-1])  # whatever their order in the file
    write(
        directory / "played" / "held_out.csv",
        [
            {"version": 0, "phase": 1, "rollouts": 0, "category": "cute", "reward": 0.0},
            {"version": 0, "phase": 1, "rollouts": 0, "category": "ghost", "reward": 0.0},
            {"version": 1, "phase": 1, "rollouts": 40, "category": "cute", "reward": 1.0},
            {"version": 1, "phase": 1, "rollouts": 40, "category": "cute", "reward": 1.0},
        ],
    )
    write(
        directory / "updates.csv",
        [
            {"version": "", "ended_at": "a", "ev_before": "", "masked_low": "", "masked_high": "", "entropy": 2.0},
            {"version": 1, "ended_at": "b", "ev_before": 0.5, "masked_low": 0.25, "masked_high": 0.5, "entropy": 1.0},
        ],
    )


def test_recovery_counts_rollouts_of_the_phase_and_is_censored_at_its_end() -> None:
    # 100 wrong, then right: a window of 128 that ends at rollout e holds e - 100 right ones; 0.5 of it is 64: e = 164
    first = [0.0] * 100 + [1.0] * 200
    second = [0.0] * 200 + [1.0] * 50  # never more than 50 of 128
    one, two = phase_results("sao", 3, {1: first, 2: second}, 0.5)
    assert (one.arm, one.seed, one.phase, one.rollouts, one.recovery) == ("sao", 3, 1, 300, 164)
    assert one.settled == (256 - 56) / 256  # the last 256 of 300 begin at rollout 44: 56 wrong ones
    assert two.recovery is None
    assert two.settled == 50 / 250


def test_a_censored_run_is_later_than_any_other() -> None:
    def row(seed: int, recovery: int | None) -> PhaseResult:
        return PhaseResult("sao", seed, 2, 300, recovery, seed / 10)

    assert summary_rows([row(1, 200), row(2, None), row(3, 400)]) == [
        ("sao", 2, "400", "1 of 3", "0.200 (0.100 to 0.300)")
    ]
    assert summary_rows([row(1, 200), row(2, None), row(3, None)])[0][2:4] == ("not reached", "2 of 3")


def test_a_run_is_read_back(tmp_path: Path) -> None:
    write_run(tmp_path, {1: [0.0, 1.0], 2: [1.0]})
    run = read_run(tmp_path)
    assert run.phases == {1: [0.0, 1.0], 2: [1.0]}
    assert run.shares == [(0, {"cute": 0.5, "ghost": 0.5}), (40, {"cute": 1.0})]
    assert [run.share_at(at, "ghost") for at in (0, 39, 40)] == [0.5, 0.5, 0.0]
    assert run.updates == {"ev_before": [None, 0.5], "entropy": [2.0, 1.0], "masked": [None, 0.75]}


def test_the_report_is_one_page_without_a_network(tmp_path: Path) -> None:
    for arm in ("sao", "group"):
        for seed in (1, 2):
            write_run(tmp_path / f"{arm}-seed-{seed}", {1: [1.0] * 200, 2: [0.0] * 200})
    html = write_report(tmp_path, ["sao", "group"], 2, 0.6).read_text()
    assert "plotly" in html
    assert 'src="http' not in html
    with (tmp_path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["phase"], row["recovery"]) for row in rows][:2] == [
        ("sao", "1", "1", "128"),
        ("sao", "1", "2", ""),
    ]
    assert len(rows) == 8


@pytest.mark.parametrize("missing", ["held_out.csv", "rollouts.csv"])
def test_a_run_without_its_files_is_not_reported(tmp_path: Path, missing: str) -> None:
    write_run(tmp_path / "sao-seed-1", {1: [1.0]})
    (tmp_path / "sao-seed-1" / "played" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        write_report(tmp_path, ["sao"], 1, 0.6)
