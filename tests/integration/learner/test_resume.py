"""Killed in the middle of an update and started again as a new process, the learner ends where it would have ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.db.session import Database
from app.policies.learning import LearningSettings, Training
from app.rollouts.learning import fail_update
from app.settings import Settings
from learner.artifacts import sha256_of
from learner.worker import LearnWorker
from tests.end_to_end.test_crash_matrix import POINTS
from tests.integration.control.processes import ROOT
from tests.integration.learner.scene import FULL, LEARNING, Scene

KILLED_AT = ("policy_step-before", "policy_step-after", "update_commit-before")
"""After the critic's steps, after a policy step, and when the files are there but not the commit."""
UPDATES = 3


def learn(settings: Settings, kill_dir: Path, kill_at: str | None = None) -> int:
    """The exit status of a new process that does all updates that are due, unless it is killed at a point."""
    (kill_dir / "points").write_text("".join(f"{point} {where}\n" for point, where in POINTS.items()))
    if kill_at is not None:
        (kill_dir / kill_at).touch()
    wrapper = ROOT / "tests" / "end_to_end" / "crash"
    environment = {
        **os.environ, "PYTHONPATH": f"{wrapper}{os.pathsep}{ROOT}", "EVERGREEN_TEST_KILL_DIR": str(kill_dir),
        "EVERGREEN_HOME": str(settings.home), "EVERGREEN_DTYPE": "float32", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    for name in ("DATABASE_URL", "EVERGREEN_DATABASE_URL", "BROKER_URL", "EVERGREEN_BROKER_URL"):
        environment.pop(name, None)
    program = f"from learner.tasks import learn_worker\nfor _ in range({UPDATES}): learn_worker().tick()"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, timeout=250, process_group=0).returncode


def prepared(home: Path, model: Path, learning: LearningSettings, training: Training) -> Scene:
    settings = Settings(home=home, dtype="float32")
    database = Database(settings.database_url)
    database.upgrade()
    scene = Scene(settings, database, model, learning, training=training)
    LearnWorker(settings, database).tick()  # version 0
    scene.rollouts(UPDATES * learning.rollouts_per_update)
    return scene


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("training", "learning"),
    [
        ("lora", LEARNING),
        ("lora", LEARNING.model_copy(update={"policy_optimiser": "adamw"})),
        ("full", FULL.model_copy(update={"gradient_checkpointing": True})),
    ],
)
def test_a_killed_learner_ends_where_it_would_have_ended(
    tiny_model: Path, tmp_path: Path, training: Training, learning: LearningSettings
) -> None:
    whole = prepared(tmp_path / "whole", tiny_model, learning, training)
    killed = prepared(tmp_path / "killed", tiny_model, learning, training)
    kill_dir = tmp_path / "kill"
    kill_dir.mkdir()
    assert learn(whole.settings, kill_dir) == 0
    for point in KILLED_AT:
        assert learn(killed.settings, kill_dir, point) == -signal.SIGKILL, point
        last = killed.updates()[-1]
        assert last.state == "running"
        with killed.database.write() as session:  # as its lease's end would, but in one group: the same batch again
            fail_update(session, last.id, last.owner, f"killed at {point}", blame_rollouts=False)
    assert learn(killed.settings, kill_dir) == 0

    for scene in (whole, killed):
        assert (scene.policy().head, scene.policy().updates_done) == (UPDATES - 1, UPDATES)
        assert scene.states() == {("trained", None): UPDATES * learning.rollouts_per_update}
    assert [u.state for u in killed.updates()] == ["done", "failed", "failed", "failed", "done", "done"]
    ours, theirs = whole.newest_checkpoint(), killed.newest_checkpoint()
    for name in ("policy.safetensors", "value.safetensors"):
        equal(load_file(ours / name), load_file(theirs / name))
    one, other = (torch.load(path / "training.pt", weights_only=True) for path in (ours, theirs))
    for name in ("policy_optimiser", "value_optimiser"):
        assert one[name]["state"]
        equal(one[name]["state"], other[name]["state"])
    assert torch.equal(one["rng"], other["rng"])
    weights = "adapter_model.safetensors" if training == "lora" else "model.safetensors"
    for mine, its in zip(whole.versions(), killed.versions(), strict=True):
        equal(load_file(Path(mine.path) / weights), load_file(Path(its.path) / weights))
        assert sha256_of(Path(its.path)) == its.sha256


def equal(one: Any, other: Any) -> None:
    """Bit by bit, in nested dictionaries."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other
