"""What a run measured: its rollouts as a table, its figures per phase, its learning curve."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from envs.board import MOVING
from envs.connection import RolloutStatus

LAST = 256
"""A phase's final mean covers this many rollouts."""
REACHED = 0.8
"""The moving mean that counts as having learned."""

COLUMNS = (
    "rollout",
    "interaction",
    "phase",
    "index",
    "version",
    "turns",
    "answer",
    "reward",
    "feedback",
    "state",
    "reason",
    "started_at",
    "latency_s",
)


@dataclass(frozen=True)
class Played:
    """One answered rollout. rollout and interaction, that of its last turn, are the server's ids."""

    rollout: str
    interaction: str
    phase: int
    index: int
    version: int
    """That answered last."""
    turns: int
    answer: str
    """Its answers, a line each if there are several."""
    reward: float
    feedback: str
    """What the server said of the reward (applied, late), or `failed`."""
    started_at: str
    latency_s: float
    """Time spent waiting for answers."""


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers of one pinned version to held-out episodes."""

    version: int
    asked: int
    correct: float
    """Sum of the rewards."""

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.asked if self.asked else None


@dataclass(frozen=True)
class HeldOut:
    """One held-out answer of a version that was watched."""

    version: int
    phase: int
    rollouts: int
    """Rollouts that had their reward when the version was first seen."""
    category: str
    """Which habit the answer shows."""
    reward: float


def moving_means(rewards: Sequence[float], width: int = MOVING) -> list[float]:
    """Mean of every full window of `width`; the first is that of rewards[0:width]."""
    sums = [0.0, *accumulate(rewards)]
    return [(sums[end] - sums[end - width]) / width for end in range(width, len(sums))]


def phase_figures(played: Sequence[Played], evaluation: Evaluation | None, failed: Mapping[str, int]) -> dict[str, Any]:
    """The figures of one phase.

    played: its rollouts, in the order in which they started. failed: its failed requests by kind.
    """
    rewards = [row.reward for row in played]
    last = rewards[-LAST:]
    means = moving_means(rewards)
    first = next((position for position, mean in enumerate(means) if mean >= REACHED), None)
    reached = None
    if first is not None:
        row = played[first + MOVING - 1]
        reached = {"rollouts": first + MOVING, "versions": row.version - played[0].version}
    return {
        "rollouts": len(played),
        f"mean_reward_last_{LAST}": sum(last) / len(last) if last else None,
        f"moving_mean_{MOVING}_reached_{REACHED}": reached,
        "failed_requests": dict(failed),
        "first_version": played[0].version if played else None,
        "last_version": max((row.version for row in played), default=None),
        "greedy": None
        if evaluation is None
        else {
            "version": evaluation.version,
            "asked": evaluation.asked,
            "correct": evaluation.correct,
            "accuracy": evaluation.accuracy,
        },
    }


def write_rollouts(path: Path, played: Sequence[Played], statuses: Mapping[str, RolloutStatus]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for row in sorted(played, key=lambda one: one.index):
            status = statuses[row.rollout]
            table.writerow({**row.__dict__, "state": status.state, "reason": status.reason})


def write_held_out(path: Path, seen: Sequence[HeldOut]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(HeldOut)])
        table.writeheader()
        table.writerows(asdict(one) for one in seen)


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
