"""Experiments resume runs of their own conditions alone; arms differ from `sao` in what they are named for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.policies.learning import PAPER, LearningSettings
from benchmarks import stability
from envs.cli import simulate_app
from evergreen import experiment
from evergreen.conditions import OtherConditions
from evergreen.experiment import ARMS, DONE, GROUP, Arm, Schedule, run_online

SCHEDULE = Schedule("tools", 64, 3, {"policy_lr": 3e-3}, "smollm2-135m-instruct", "float32", phases=2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that are made, each done at once; no report."""
    names: list[str] = []

    def run(arm: Arm, schedule: Schedule, _seed: int, directory: Path, _port: int) -> None:
        names.append(directory.name)
        directory.mkdir()
        done = {"settings": schedule.effective(arm), "play": list(arm.play)}
        (directory / DONE).write_text(json.dumps(done))

    monkeypatch.setattr(experiment, "_run", run)
    monkeypatch.setattr(experiment, "write_report", lambda out, *_: out)
    return names


def play(schedule: Schedule, out: Path, arms: str = "sao,group", seeds: int = 1) -> None:
    run_online(schedule, arms.split(","), seeds, out, 1, 0.6, lambda _: None)


def test_runs_of_the_same_conditions_are_not_made_again(tmp_path: Path, made: list[str]) -> None:
    play(SCHEDULE, tmp_path)
    play(SCHEDULE, tmp_path, "sao,group,no_dis", 2)
    assert made == ["sao-seed-1", "group-seed-1", "no_dis-seed-1", "sao-seed-2", "group-seed-2", "no_dis-seed-2"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"model": "other"}, "model"),
        ({"phases": None}, "phases"),
        ({"rollouts_per_phase": 96}, "rollouts_per_phase"),
        ({"watched": 4}, "watched"),
        ({"settings": {"policy_lr": 4e-3}}, "settings.policy_lr"),
    ],
)
def test_another_schedule_is_refused(tmp_path: Path, made: list[str], change: dict[str, Any], named: str) -> None:
    play(SCHEDULE, tmp_path)
    with pytest.raises(OtherConditions, match=rf"schedule\.json .*: {named} was "):
        play(replace(SCHEDULE, **change), tmp_path)
    assert made == ["sao-seed-1", "group-seed-1"]


def test_other_defaults_are_refused(tmp_path: Path, made: list[str]) -> None:
    """As after an upgrade that changes a default."""
    play(SCHEDULE, tmp_path)
    path = tmp_path / "schedule.json"
    there = json.loads(path.read_text())
    there["defaults"]["centring"] = 0.5
    path.write_text(json.dumps(there))
    with pytest.raises(OtherConditions, match=r"defaults\.centring was 0\.5 and is now 0\.95"):
        play(SCHEDULE, tmp_path)


def test_an_arm_that_is_another_now_is_refused_before_anything_is_run(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(SCHEDULE, tmp_path, "sao,no_dis")
    monkeypatch.setattr(experiment, "ARMS", {**ARMS, "no_dis": Arm({"clip": "ppo"})})
    with pytest.raises(OtherConditions, match=r'no_dis-seed-1.* settings\.clip was "none" and is now "ppo"'):
        play(SCHEDULE, tmp_path, "sao,no_dis", 2)
    assert made == ["sao-seed-1", "no_dis-seed-1"]


def test_a_setting_that_does_not_exist_is_found_before_a_server_starts(tmp_path: Path, made: list[str]) -> None:
    with pytest.raises(ValueError, match="polcy_lr"):
        play(replace(SCHEDULE, settings={"polcy_lr": 1}), tmp_path)
    assert made == []
    assert not list(tmp_path.iterdir())


def test_a_server_with_other_settings_than_the_arms_is_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        """Its policy has the paper's preset, whatever it is told."""

        def __enter__(self) -> tuple[httpx.Client, dict[str, str]]:
            answer = {"settings": LearningSettings.model_validate({"preset": "paper"}).model_dump(mode="json")}
            transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
            return httpx.Client(base_url="http://server", transport=transport), {}

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(experiment, "own_server", lambda *_: Server())
    monkeypatch.setattr(experiment, "write_report", lambda out, *_: out)
    with pytest.raises(RuntimeError, match=r"sao-seed-1: its server learns with .*'preset': 'paper'"):
        play(SCHEDULE, tmp_path, "sao")
    assert not (tmp_path / "sao-seed-1" / DONE).exists()


def differences(settings: dict[str, Any]) -> set[str]:
    """From the defaults, of a policy's whole settings."""
    usual = LearningSettings().model_dump()
    arm = LearningSettings.model_validate(settings).model_dump()
    return {name for name in usual if arm[name] != usual[name]}


EXPERIMENT_ARMS = {name: dict(arm.settings) for name, arm in ARMS.items()}


@pytest.mark.parametrize(
    ("arms", "parameters"),
    [(EXPERIMENT_ARMS, {"group": {"group_size"}}), (stability.ARMS, {})],
    ids=["experiment", "stability"],
)
def test_an_arm_differs_from_sao_in_one_setting(
    arms: dict[str, dict[str, Any]], parameters: dict[str, set[str]]
) -> None:
    """And in that setting's own parameter: a group has a size. `paper` is a preset: all that it sets, and no more."""
    named = {"running_mean": "advantage", "group": "advantage", "no_dis": "clip"}
    assert arms["sao"] == {}
    for name in arms.keys() - {"sao", "paper"}:
        assert differences(arms[name]) == {named[name]} | parameters.get(name, set()), name
    assert differences(arms["paper"]) == {"preset", *PAPER}


def test_an_arm_that_plays_groups_learns_from_groups_of_that_size() -> None:
    assert {name: tuple(arm.play) for name, arm in ARMS.items() if arm.play} == {"group": ("--group-size", str(GROUP))}
    assert SCHEDULE.effective(ARMS["group"])["group_size"] == GROUP


@pytest.mark.parametrize("environment", ["tickets", "writing", "tools"])
def test_every_environment_takes_what_a_schedule_says(environment: str, tmp_path: Path) -> None:
    """Its options are read and the environment is made: it stops only at a directory that holds a run."""
    (tmp_path / "journal.jsonl").touch()
    for arm in ARMS.values():
        command = replace(SCHEDULE, environment=environment).command(arm, 1, tmp_path)
        options = command[command.index("simulate") + 1 :]
        answer = CliRunner().invoke(simulate_app, [*options, "--api-key", "k"], terminal_width=200)
        assert "already holds a run" in " ".join(answer.output.split()), answer.output
