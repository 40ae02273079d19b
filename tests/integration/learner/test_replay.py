"""Versions made again from the database alone, by a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
import torch
from sqlalchemy import delete
from sqlalchemy import update as sql_update

import learner.replay
from app.db.models import Feedback, Interaction, Policy, PolicyVersion, Update
from app.db.session import Database
from app.feedback.rules import NewFeedback, apply_feedback
from app.policies.files import delete_directory
from app.policies.learning import FORM
from app.settings import Settings
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, Scene
from tests.unit.learner.conftest import full_settings

NewWorker = Callable[[], LearnWorker]


def replay(scene: Scene, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {"EVERGREEN_HOME": str(scene.settings.home), "EVERGREEN_DTYPE": "float32"}
    command = [sys.executable, "-P", "-m", "evergreen.cli", "replay", "--policy", "p", *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def train(scene: Scene, worker: LearnWorker, updates: int) -> None:
    for _ in range(updates):
        scene.rollouts(4)
        worker.tick()


@pytest.fixture
def trained(scene: Scene, new_worker: NewWorker) -> Scene:
    """A critic's warm-up, two versions, a value pretraining, and three versions more, with other settings than the
    first and the last two by another worker."""
    worker = new_worker()
    worker.tick()
    train(scene, worker, 3)
    worker.pretrain(scene.policy_id, 2)
    with scene.database.write() as session:
        changed = LEARNING.model_copy(update={"anchor_coefficient": 0.3, "policy_steps": 1})
        session.execute(sql_update(Policy).values(settings=changed.model_dump(mode="json")))
    train(scene, worker, 1)
    train(scene, new_worker(), 2)
    assert scene.policy().head == 5
    return scene


def equal_versions(done: subprocess.CompletedProcess[str]) -> list[int]:
    return [int(line.split("version ")[1].split()[0]) for line in done.stdout.splitlines() if "is equal" in line]


def test_every_version_is_made_again_from_version_zero(trained: Scene) -> None:
    done = replay(trained, "--to", "5", "--from", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert equal_versions(done) == [1, 2, 3, 4, 5]
    assert "the critic alone" in done.stdout
    assert "not as then" not in done.stdout
    for version in trained.versions()[1:]:
        assert version.sha256 in done.stdout


def test_twenty_updates(scene: Scene, new_worker: NewWorker) -> None:
    train(scene, new_worker(), 20)
    head = scene.policy().head
    assert head is not None
    assert head > 15  # the first update was a warm-up, and a batch of nothing but 1 leaves nothing to gain
    done = replay(scene, "--to", str(head), "--from", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert equal_versions(done) == list(range(1, head + 1))


def test_full_weights(settings: Settings, database: Database, tiny_model: Path, new_worker: NewWorker) -> None:
    changes = {"rollouts_per_update": 4, "min_rollouts": 4, "critic_warmup_updates": 1, "policy_lr": 1e-3}
    scene = Scene(settings, database, tiny_model, full_settings(**changes), training="full")
    train(scene, new_worker(), 4)
    done = replay(scene, "--to", "3", "--from", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert equal_versions(done) == [1, 2, 3]
    for version in scene.versions()[1:]:
        assert version.sha256 in done.stdout


def test_it_begins_at_the_nearest_kept_checkpoint(trained: Scene) -> None:
    assert equal_versions(replay(trained, "--to", "5")) == [5]
    assert equal_versions(replay(trained, "--to", "4")) == [4]  # the checkpoints of 3, 4 and 5 are kept
    assert equal_versions(replay(trained, "--to", "5", "--from", "3")) == [4, 5]
    assert equal_versions(replay(trained, "--to", "3")) == [1, 2, 3]
    refused = replay(trained, "--to", "5", "--from", "1")
    assert refused.returncode == 2
    assert "the checkpoint of version 1 is not kept; a replay can start from 0, 3, 4" in refused.stdout


def test_a_version_that_was_not_trained_so_is_told(trained: Scene) -> None:
    with trained.database.write() as session:
        session.execute(sql_update(PolicyVersion).where(PolicyVersion.number == 5).values(sha256="0" * 64))
    done = replay(trained, "--to", "5", "--from", "0")
    assert done.returncode == 1
    assert equal_versions(done) == [1, 2, 3, 4]
    assert "version 5 DIFFERS" in done.stdout
    assert "weights differ by 0.0e+00 at most" in done.stdout  # the row lies, not the files


def test_other_tokens_make_other_weights(trained: Scene) -> None:
    with trained.database.write() as session:
        first = trained.updates()[1].provenance
        assert first is not None
        row = session.query(Interaction).filter(Interaction.rollout_id == UUID(first["rollouts"][0])).one()
        assert row.logprobs is not None
        row.logprobs = row.logprobs - 0.5
    delete_directory(Path(trained.versions()[1].path))
    done = replay(trained, "--to", "2", "--from", "0")
    assert done.returncode == 1
    assert "version 1 DIFFERS" in done.stdout
    assert "(its files are gone)" in done.stdout
    assert "weights differ by" in done.stdout


def test_missing_rollouts_are_named_and_refused(trained: Scene) -> None:
    done_update = trained.updates()[2]
    assert done_update.provenance is not None
    one, other = (UUID(rollout) for rollout in done_update.provenance["rollouts"][:2])
    with trained.database.write() as session:
        session.execute(delete(Interaction).where(Interaction.rollout_id.in_([one, other])))
    refused = replay(trained, "--to", "5", "--from", "0")
    assert refused.returncode == 2
    assert f"update {done_update.id} was trained on rollouts that are gone: {one}, {other}" in refused.stdout


def test_another_base_model_is_named(trained: Scene) -> None:
    with trained.database.write() as session:
        for update in session.query(Update).order_by(Update.id):
            assert update.provenance is not None
            update.provenance = update.provenance | {"base_sha256": "0" * 64}
    done = replay(trained, "--to", "5")
    assert f"not as then, so that hashes may differ: base model {'0' * 64} then, " in done.stdout
    assert equal_versions(done) == [5]  # the row lies, not the files


def test_another_form_of_learning_is_named(trained: Scene) -> None:
    """A release that recorded none was of the first; another changes what an update makes of the same rollouts."""
    with trained.database.write() as session:
        for update in session.query(Update).order_by(Update.id):
            assert update.provenance is not None
            update.provenance = {name: value for name, value in update.provenance.items() if name != "form"}
    done = replay(trained, "--to", "5")
    assert f"not as then, so that hashes may differ: form of learning 1 then, {FORM} now" in done.stdout
    assert equal_versions(done) == [5]  # the row lies


def test_settings_that_this_release_does_not_know_are_named_and_refused(trained: Scene) -> None:
    with trained.database.write() as session:
        update = session.query(Update).filter(Update.version == 3).one()
        update.settings = update.settings | {"anchor_settled_power": 2.0}
        name = str(update.id)
    refused = replay(trained, "--to", "5", "--from", "0")
    assert refused.returncode == 2
    unknown = f"update {name} was made with settings that this release does not know (anchor_settled_power: "
    assert unknown in refused.stdout


def test_it_keeps_no_files_that_it_does_not_need(
    trained: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda _: True)  # a mode of this whole process
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for _ in learner.replay.replay(trained.database, trained.settings, "p", 5, 0):
        assert len(list(scratch.glob("*/p/checkpoints/*"))) == 1
        assert len(list(scratch.glob("*/p/versions/*"))) <= 1
    assert list(scratch.iterdir()) == []
    assert all(Path(version.path).is_dir() for version in trained.versions())


def test_changed_rewards_are_named_and_refused(trained: Scene) -> None:
    done_update = trained.updates()[2]
    assert done_update.provenance is not None
    rollout = UUID(done_update.provenance["rollouts"][0])
    with trained.database.write() as session:
        session.execute(sql_update(Feedback).where(Feedback.rollout_id == rollout).values(value=0.25))
    refused = replay(trained, "--to", "5", "--from", "0")
    assert refused.returncode == 2
    assert f"was trained on other rewards of rollouts: {rollout}" in refused.stdout


def test_a_reward_that_moved_to_another_turn_is_refused(scene: Scene, new_worker: NewWorker) -> None:
    """Its rollout's return is as it was."""
    moved = scene.rollout(reward=0.25, turn_reward=0.5)
    scene.rollouts(7)
    worker = new_worker()
    for _ in range(2):
        worker.tick()
    assert scene.policy().head == 1
    with scene.database.write() as session:
        turn, own = session.query(Feedback).filter(Feedback.rollout_id == moved).order_by(Feedback.id)
        turn.value, own.value = own.value, turn.value
    refused = replay(scene, "--to", "1")
    assert refused.returncode == 2
    assert f"was trained on other rewards of rollouts: {moved}" in refused.stdout


def test_a_pretraining_on_rewards_that_were_revised_later(scene: Scene, new_worker: NewWorker) -> None:
    """Its rollouts were ready, and trained with other rewards afterwards."""
    worker = new_worker()
    worker.tick()
    ready = scene.rollouts(4)
    worker.pretrain(scene.policy_id, 2)
    with scene.database.write() as session:
        for rollout in ready:
            again = NewFeedback(str(rollout), None, 0.125, body_sha256="b" * 64)
            assert apply_feedback(session, scene.key, again)["status"] == "applied"
    train(scene, worker, 3)
    assert scene.policy().head == 2
    done = replay(scene, "--to", "2", "--from", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert equal_versions(done) == [1, 2]


def test_a_version_that_does_not_exist(trained: Scene) -> None:
    refused = replay(trained, "--to", "9")
    assert refused.returncode == 2
    assert "p has no version 9; its newest is 5" in refused.stdout
    assert "nothing to rebuild" in replay(trained, "--to", "0").stdout
