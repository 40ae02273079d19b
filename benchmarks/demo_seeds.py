"""The demo on several seeds: does the served model follow the tickets' mapping through two switches?

    .venv/bin/python benchmarks/demo_seeds.py            # seeds 1 to 5, then seed 1 with the paper's preset

Each run has a fresh home, its own ports and its own `evergreen up`. A run that has its result in
benchmarks/results/demo/ is skipped, so the script can be stopped and started again; a run that was stopped half way
starts over. Rewards are the server's (/admin/rollouts), joined to the client's rollouts.csv on the rollout's id.
"""

import argparse
import csv
import json
import shutil
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from envs.board import MOVING
from envs.results import LAST, REACHED, moving_means
from evergreen.own_server import evergreen, own_server

RESULTS = Path(__file__).parent / "results" / "demo"
RUN_WITHIN_S = 2 * 3600
WANTED_MEAN = 0.85
Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    seed: int
    preset: str

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" if self.preset == "online" else f"{self.preset}-seed-{self.seed}"


def simulate(seed: int, out: Path, environment: dict[str, str]) -> int:
    """Exit status of the simulation; one that takes too long is interrupted and leaves what it has measured."""
    command = evergreen("simulate", "tickets", "--seed", str(seed), "--out", str(out))
    player = subprocess.Popen(command, env=environment)
    try:
        return player.wait(RUN_WITHIN_S)
    except subprocess.TimeoutExpired:
        player.send_signal(signal.SIGINT)
        return player.wait(60)


def pages(admin: httpx.Client, path: str) -> list[Json]:
    """All rows of an admin list."""
    rows: list[Json] = []
    after: str | None = None
    while True:
        query: Json = {"policy": "default", "limit": 1000} | ({"after": after} if after else {})
        page = admin.get(path, params=query).raise_for_status().json()
        rows += page["data"]
        after = page["next"]
        if after is None:
            return rows


def collect(run: Run, out: Path, admin: httpx.Client, status: int) -> Json:
    with (out / "rollouts.csv").open(newline="") as file:
        played = list(csv.DictReader(file))
    summary = json.loads((out / "summary.json").read_text())
    stored = {row["id"]: row for row in pages(admin, "/admin/rollouts")}
    updates = [row for row in pages(admin, "/admin/updates") if row["state"] == "done"]
    known = [row for row in played if row["rollout"] in stored]
    return {
        "seed": run.seed,
        "preset": run.preset,
        "complete": status == 0 and summary["complete"],
        "seconds": summary["seconds"],
        "failed_requests": summary["failed_requests"],
        "rollouts_missing_on_the_server": len(played) - len(known),
        "rewards_that_differ": sum(stored[row["rollout"]]["return"] != float(row["reward"]) for row in known),
        "states": Counter(stored[row["rollout"]]["reason"] or stored[row["rollout"]]["state"] for row in known),
        "phases": [
            figures | {"greedy": summary["phases"][figures["phase"] - 1]["greedy"]}
            for figures in phase_figures(known, stored, updates)
        ],
        "stats": admin.get("/admin/stats").raise_for_status().json(),
        "updates": sorted(updates, key=lambda row: str(row["ended_at"])),
    }


def phase_figures(played: Sequence[Json], stored: dict[str, Json], updates: Sequence[Json]) -> list[Json]:
    """Per phase: rewards as stored, and how many updates ended before the moving mean got there.

    played: rows of rollouts.csv in order. Times are the server's; an update belongs to the phase in which it ended.
    """
    ends = sorted(datetime.fromisoformat(row["ended_at"]) for row in updates)
    by_phase: dict[int, list[Json]] = {}
    for row in played:
        by_phase.setdefault(int(row["phase"]), []).append(stored[row["rollout"]])
    begins = [datetime.fromisoformat(rows[0]["opened_at"]) for rows in by_phase.values()]
    figures: list[Json] = []
    for position, (phase, rows) in enumerate(by_phase.items()):
        begin = begins[position]
        until = begins[position + 1] if position + 1 < len(begins) else None
        rewards = [row["return"] or 0.0 for row in rows]
        first = next((n for n, mean in enumerate(moving_means(rewards)) if mean >= REACHED), None)
        reached = None
        if first is not None:
            at = datetime.fromisoformat(rows[first + MOVING - 1]["opened_at"])
            reached = {"rollouts": first + MOVING, "updates": sum(begin < end <= at for end in ends)}
        figures.append(
            {
                "phase": phase,
                "rollouts": len(rows),
                "updates": sum(begin < end and (until is None or end <= until) for end in ends),
                "mean_reward_last_256": statistics.fmean(rewards[-LAST:]),
                "reached_0.8": reached,
            }
        )
    return figures


def table(results: Sequence[Json]) -> str:
    """The results as Markdown, phases separated by slashes, and the two figures that the demo is judged by."""
    lines = [
        "| run | mean reward, last 256 | updates to 0.8 | greedy, held out | updates | minutes | failed requests |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        phases = result["phases"]
        cells = [
            f"{result['preset']}, seed {result['seed']}" + ("" if result["complete"] else " (incomplete)"),
            " / ".join(f"{p['mean_reward_last_256']:.3f}" for p in phases),
            " / ".join(str(p["reached_0.8"]["updates"]) if p["reached_0.8"] else "never" for p in phases),
            " / ".join(f"{p['greedy']['accuracy']:.3f}" if p["greedy"] else "-" for p in phases),
            " / ".join(str(p["updates"]) for p in phases),
            f"{result['seconds'] / 60:.1f}",
            str(sum(result["failed_requests"].values())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    online = [result for result in results if result["preset"] == "online"]
    passed = sum(
        result["complete"] and all(p["mean_reward_last_256"] >= WANTED_MEAN for p in result["phases"])
        for result in online
    )
    after_switch = [
        p["reached_0.8"]["updates"] if p["reached_0.8"] else float("inf")
        for result in online
        for p in result["phases"][1:]
    ]
    lines += ["", f"Mean of at least {WANTED_MEAN} in every phase: {passed} of {len(online)} seeds."]
    if after_switch:
        lines.append(f"Updates from a switch to a moving mean of {REACHED}, median: {statistics.median(after_switch)}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--paper-seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--port", type=int, default=24100, help="the server's; the engine takes the next one")
    parser.add_argument("--work", type=Path, default=Path("var/demo"), help="homes of the servers; removed when done")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs = [Run(seed, "online") for seed in options.seeds] + [Run(seed, "paper") for seed in options.paper_seeds]
    for run in runs:
        target = RESULTS / f"{run.name}.json"
        if target.exists():
            print(f"{run.name}: done already")
            continue
        home = (options.work / run.name).resolve()
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        with own_server(home, options.port, {"EVERGREEN_PRESET": run.preset}) as (admin, environment):
            result = collect(run, home / "run", admin, simulate(run.seed, home / "run", environment))
        partial = target.with_suffix(".tmp")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.rename(target)
        shutil.rmtree(home)
    done = [RESULTS / f"{run.name}.json" for run in runs]
    report = table([json.loads(path.read_text()) for path in done])
    (RESULTS / "README.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
