"""Figures and files of a run, against values worked out by hand."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from envs.connection import RolloutStatus
from envs.curve import write_curve
from envs.journal import Journal
from envs.results import Evaluation, Played, moving_means, phase_figures, write_rollouts


def rollout(index: int, reward: float, version: int = 0, phase: int = 1) -> Played:
    return Played(
        rollout=f"r{index}",
        interaction=f"i{index}",
        phase=phase,
        index=index,
        version=version,
        turns=1,
        answer="red",
        reward=reward,
        feedback="applied",
        started_at="2026-01-01T00:00:00+00:00",
        latency_s=0.1,
    )


def test_moving_means() -> None:
    assert moving_means([1.0, 0.0, 0.5, 1.0], 2) == [0.5, 0.25, 0.75]
    assert moving_means([1.0], 2) == []


def test_the_moving_mean_reaches_the_mark_where_it_should() -> None:
    # 32 wrong, then right. The window that ends at rollout e >= 64 holds 96 - e wrong ones; 51/64 < 0.8 <= 52/64,
    # so at most 12 may be wrong: e = 84. Eight rollouts per version: rollout 84 (index 83) has version 5 + 10.
    played = [rollout(i, float(i >= 32), version=5 + i // 8) for i in range(300)]
    figures = phase_figures(played, Evaluation(version=42, asked=200, correct=170.0), {"completion: timeout": 2})
    assert figures["moving_mean_64_reached_0.8"] == {"rollouts": 84, "versions": 10}
    assert figures["mean_reward_last_256"] == 1.0  # the last 256 start at index 44
    assert figures["greedy"]["accuracy"] == 0.85
    assert figures["failed_requests"] == {"completion: timeout": 2}
    assert (figures["rollouts"], figures["first_version"], figures["last_version"]) == (300, 5, 42)


def test_a_phase_that_never_got_there() -> None:
    figures = phase_figures([rollout(i, float(i % 2)) for i in range(100)], None, {})
    assert figures["moving_mean_64_reached_0.8"] is None
    assert figures["mean_reward_last_256"] == 0.5
    assert figures["greedy"] is None
    assert phase_figures([], None, {})["mean_reward_last_256"] is None


def test_rollouts_are_written_in_the_order_of_their_start_with_their_last_state(tmp_path: Path) -> None:
    played = [rollout(1, 1.0), replace(rollout(0, 0.0), answer='red,\n"or so"')]
    statuses = {"r0": RolloutStatus("skipped", "stale"), "r1": RolloutStatus("trained", None)}
    write_rollouts(tmp_path / "rollouts.csv", played, statuses)
    with (tmp_path / "rollouts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["rollout"], r["reward"], r["state"], r["reason"]) for r in rows] == [
        ("r0", "0.0", "skipped", "stale"),
        ("r1", "1.0", "trained", ""),
    ]
    assert rows[0]["answer"] == 'red,\n"or so"'


def test_the_curve_needs_no_network(tmp_path: Path) -> None:
    played = [rollout(i, float(i % 2), phase=1 + i // 100) for i in range(200)]
    write_curve(tmp_path / "curve.html", "title", played, {1: Evaluation(3, 200, 180.0)})
    page = (tmp_path / "curve.html").read_text()
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)
    assert "Plotly.newPlot" in page
    assert '"switch"' in page


def test_the_curve_of_a_short_run_has_its_mean(tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.html", "title", [rollout(i, float(i < 1)) for i in range(4)], {})
    page = (tmp_path / "curve.html").read_text()
    assert '"sampled reward, mean of 4"' in page
    assert re.search(r'"x":\[4\],"y":\[0\.25\]', page)
    write_curve(tmp_path / "curve.html", "title", [], {})  # stopped before the first answer


def test_the_journal_is_flushed_line_by_line_and_never_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    journal = Journal(path)
    journal.write("completion", interaction="i1", answer="blåå\n")
    line = json.loads(path.read_text(encoding="utf-8"))  # read while the journal is open
    assert (line["event"], line["interaction"], line["answer"]) == ("completion", "i1", "blåå\n")
    journal.close()
    with pytest.raises(FileExistsError):
        Journal(path)
