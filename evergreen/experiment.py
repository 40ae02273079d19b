"""`evergreen experiment online`: arms that differ in one setting, on the same schedule of a changing environment.

One arm is one run: a fresh server, its learning settings, `evergreen simulate` with its seed. A run that is done is
not made again; one that was stopped half way starts over.
"""

import csv
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.policies.learning import FORM, LearningSettings
from evergreen.conditions import check_conditions
from evergreen.experiment_report import write_report
from evergreen.own_server import evergreen, own_server

DONE = "done.json"
"""Written last: its directory holds a whole run."""
UPDATE_FIGURES = (
    "mean_reward", "ev_before", "ev_after", "masked_low", "masked_high", "entropy", "base_kl", "policy_lr",
)  # fmt: skip
Json = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """settings: learning settings that differ from the defaults. play: further options of `evergreen simulate`."""

    settings: Mapping[str, Any]
    play: Sequence[str] = field(default=())


GROUP = 4
ARMS: Mapping[str, Arm] = {
    "sao": Arm({}),
    "running_mean": Arm({"advantage": "running_mean"}),
    "group": Arm({"advantage": "group", "group_size": GROUP}, ("--group-size", str(GROUP))),
    "no_dis": Arm({"clip": "none"}),
    "paper": Arm({"preset": "paper"}),
}
"""The paper's comparators (arXiv 2607.07508, section 4.5 and its ablations), each one setting away from `sao`. `group`
has a parameter of its own, its size; `paper` is a preset, hence as many settings as that differs in."""


@dataclass(frozen=True)
class Schedule:
    """What every arm plays."""

    environment: str
    rollouts_per_phase: int
    watched: int
    """Held-out episodes that each version is asked."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Learning settings that differ from the defaults in every arm, where the arm itself does not set them."""
    model: str = ""
    """What EVERGREEN_MODEL names."""
    dtype: str = "auto"
    """What EVERGREEN_DTYPE says."""
    phases: int | None = None
    """None: all that the environment has."""

    def conditions(self) -> Json:
        """The defaults too: settings that are not named here take them."""
        return asdict(self) | {"defaults": LearningSettings().model_dump(mode="json"), "form": FORM}

    def effective(self, arm: Arm) -> Json:
        """All learning settings that the policy of an arm has."""
        return LearningSettings.model_validate({**self.settings, **arm.settings}).model_dump(mode="json")

    def command(self, arm: Arm, seed: int, played: Path) -> list[str]:
        """`evergreen simulate`, without the server that it plays against."""
        command = evergreen("simulate", self.environment, "--seed", str(seed), "--out", str(played))
        command += ["--rollouts-per-phase", str(self.rollouts_per_phase), "--watch", str(self.watched)]
        if self.phases is not None:
            command += ["--phases", str(self.phases)]
        return [*command, *arm.play]


def run_online(
    schedule: Schedule, arms: Sequence[str], seeds: int, out: Path, port: int, level: float, say: Callable[[str], None]
) -> Path:
    """Makes the runs that are missing in `out`, seed by seed, then the report; returns the report's path.

    Raises:
        ValueError: an arm or a setting that does not exist, or `out` holds runs of another schedule or other settings.
        RuntimeError: a run failed; those before it are kept.
    """
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(f"no such arm: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    conditions = {name: _conditions(schedule, ARMS[name]) for name in arms}
    out.mkdir(parents=True, exist_ok=True)
    _same_schedule(schedule, out / "schedule.json")
    for name in arms:  # all of them before hours are spent on one
        for done in sorted(out.glob(f"{name}-seed-*/{DONE}")):
            check_conditions(done, json.loads(done.read_text()), conditions[name])
    for seed in range(1, seeds + 1):
        for name in arms:
            directory = out / f"{name}-seed-{seed}"
            if (directory / DONE).exists():
                say(f"{directory.name}: done already")
                continue
            say(f"{directory.name} ...")
            _run(ARMS[name], schedule, seed, directory, port)
    return write_report(out, arms, seeds, level)


def _same_schedule(schedule: Schedule, path: Path) -> None:
    """Runs of different schedules are not compared.

    Raises:
        OtherConditions: those that are there are of another one.
    """
    if path.exists():
        check_conditions(path, json.loads(path.read_text()), schedule.conditions())
    else:
        path.write_text(json.dumps(schedule.conditions(), indent=2) + "\n")


def _conditions(schedule: Schedule, arm: Arm) -> Json:
    """What an arm's run was made with, beside the schedule."""
    return {"settings": schedule.effective(arm), "play": list(arm.play)}


def _run(arm: Arm, schedule: Schedule, seed: int, directory: Path, port: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    home = directory / "home"
    home.mkdir(parents=True)
    played = directory / "played"
    with own_server(home, port, {}) as (admin, environment):
        if changed := {**schedule.settings, **arm.settings}:
            policy = admin.patch("/admin/policies/default", json={"settings": changed})
            _require(policy)
        settings = _require(admin.get("/admin/policies/default"))["settings"]
        wanted = _conditions(schedule, arm)
        if settings != wanted["settings"]:
            raise RuntimeError(f"{directory.name}: its server learns with {settings}, not with {wanted['settings']}")
        status = subprocess.run(schedule.command(arm, seed, played), env=environment).returncode
        if status:
            raise RuntimeError(f"{directory.name}: the simulation ended with status {status}; see {played}")
        _write_updates(directory / "updates.csv", _updates(admin))
    shutil.rmtree(home)
    (directory / DONE).write_text(json.dumps(wanted, indent=2) + "\n")


def _require(response: httpx.Response) -> Json:
    if response.is_error:
        raise RuntimeError(f"{response.request.method} {response.request.url}: {response.status_code} {response.text}")
    answer: Json = response.json()
    return answer


def _updates(admin: httpx.Client) -> list[Json]:
    """All done updates, oldest first."""
    rows: list[Json] = []
    after: str | None = None
    while True:
        query: Json = {"policy": "default", "limit": 1000} | ({"after": after} if after else {})
        page = _require(admin.get("/admin/updates", params=query))
        rows += [row for row in page["data"] if row["state"] == "done"]
        after = page["next"]
        if after is None:
            return sorted(rows, key=lambda row: str(row["ended_at"]))


def _write_updates(path: Path, updates: Iterable[Json]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["version", "ended_at", *UPDATE_FIGURES])
        table.writeheader()
        for row in updates:
            figures = {name: _figure((row["health"] or {}).get(name)) for name in UPDATE_FIGURES}
            table.writerow({"version": row["version"], "ended_at": row["ended_at"], **figures})


def _figure(value: float | list[float] | None) -> float | None:
    """Figures of each policy step become their mean."""
    return statistics.fmean(value) if isinstance(value, list) else value
