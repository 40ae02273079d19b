"""Figures of the seeds benchmark, against values worked out by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.demo_seeds import phase_figures, table

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: float) -> str:
    return (START + timedelta(seconds=second)).isoformat()


def rollouts(phase: int, first_second: int, rewards: list[float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One rollout a second. The client's reward is wrong: only the stored one gives the right figures."""
    played = [{"rollout": f"{phase}-{n}", "phase": str(phase), "reward": "0.5"} for n in range(len(rewards))]
    stored = {
        row["rollout"]: {"opened_at": at(first_second + n), "return": reward}
        for n, (row, reward) in enumerate(zip(played, rewards, strict=True))
    }
    return played, stored


def test_rewards_are_the_servers_and_updates_count_from_the_switch() -> None:
    first, first_stored = rollouts(1, 0, [0.0] * 32 + [1.0] * 68)
    second, second_stored = rollouts(2, 100, [0.0] * 100)
    updates = [{"ended_at": at(second)} for second in (9.5, 50.5, 82.5, 83.5, 99.5, 150.5)]
    one, two = phase_figures(first + second, first_stored | second_stored, updates)
    # 52/64 right is the first mean of 0.8 or more: rollout 84, which opened at second 83; three updates had ended
    assert one["reached_0.8"] == {"rollouts": 84, "updates": 3}
    assert (one["updates"], two["updates"]) == (5, 1)
    assert one["mean_reward_last_256"] == 0.68
    assert two["reached_0.8"] is None
    assert two["mean_reward_last_256"] == 0.0


def result(preset: str, seed: int, means: list[float], updates: list[int | None]) -> dict[str, Any]:
    return {
        "preset": preset,
        "seed": seed,
        "complete": True,
        "seconds": 90.0,
        "failed_requests": {"completion: timeout": 2},
        "phases": [
            {
                "mean_reward_last_256": mean,
                "reached_0.8": None if count is None else {"updates": count},
                "greedy": {"accuracy": 0.9},
                "updates": 40,
            }
            for mean, count in zip(means, updates, strict=True)
        ],
    }


def test_the_verdict_counts_online_seeds_and_switches_only() -> None:
    text = table(
        [
            result("online", 1, [0.9, 0.85, 0.9], [20, 5, 7]),
            result("online", 2, [0.9, 0.84, 0.9], [21, 11, None]),
            result("paper", 1, [0.1, 0.1, 0.1], [None, None, None]),
        ]
    )
    assert (
        "| online, seed 1 | 0.900 / 0.850 / 0.900 | 20 / 5 / 7 | 0.900 / 0.900 / 0.900 | 40 / 40 / 40 | 1.5 | 2 |"
        in text
    )
    assert "1 of 2 seeds" in text
    assert "median: 9.0." in text  # of 5, 7, 11 and never
