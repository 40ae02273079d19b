"""What one run of an experiment left on disk, as series."""

import csv
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Series:
    phases: dict[int, list[float]]
    """Phase -> its rewards, in the order in which its rollouts started."""
    shares: list[tuple[int, dict[str, float]]]
    """Per watched version: rollouts rewarded before it was seen, and the share of each category; ascending."""
    updates: dict[str, list[float | None]]
    """Figure -> its values per done update, oldest first; `masked`: share of tokens outside the band, both sides."""

    def share_at(self, rollouts: int, category: str) -> float:
        """That of the newest version seen by then; 0 before the first."""
        position = bisect_right([at for at, _ in self.shares], rollouts)
        return self.shares[position - 1][1].get(category, 0.0) if position else 0.0


def read_run(directory: Path) -> Series:
    """Reads played/rollouts.csv, played/held_out.csv and updates.csv of a run that is done."""
    phases: dict[int, list[float]] = defaultdict(list)
    for row in sorted(_rows(directory / "played" / "rollouts.csv"), key=lambda row: int(row["index"])):
        phases[int(row["phase"])].append(float(row["reward"]))
    seen: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for row in _rows(directory / "played" / "held_out.csv"):
        seen[int(row["rollouts"]), int(row["version"])][row["category"]] += 1
    shares = [
        (rollouts, {name: count / counts.total() for name, count in counts.items()})
        for (rollouts, _), counts in sorted(seen.items())
    ]
    updates: dict[str, list[float | None]] = defaultdict(list)
    for row in _rows(directory / "updates.csv"):
        for name in row.keys() - {"version", "ended_at", "masked_low", "masked_high"}:
            updates[name].append(_number(row[name]))
        low, high = _number(row["masked_low"]), _number(row["masked_high"])
        updates["masked"].append(None if low is None or high is None else low + high)
    return Series(dict(phases), shares, dict(updates))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None
