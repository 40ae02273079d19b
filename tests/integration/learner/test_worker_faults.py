"""The learn worker when something is wrong: with a rollout, a file, a policy, or another learner."""

import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

import learner.update
import learner.worker
from app.db.models import Policy, Update
from app.db.repositories.policies import get_policy
from app.db.types import clock
from app.rollouts.claimed import Claim
from app.rollouts.learning import Idle
from learner.update_files import ORPHANED_AFTER_S
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, Scene

NewWorker = Callable[[], LearnWorker]
in_both_ways_to_train = pytest.mark.parametrize("training", ["lora", "full"])


@in_both_ways_to_train
def test_a_second_learner_is_fenced_off(scene: Scene, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first trains, the second gets nothing; once the first's lease has run out, the second takes over, and
    what the first then finishes is thrown away."""
    rollouts = scene.rollouts(4)
    first, second = new_worker(), new_worker()
    real = learner.update.run_update
    during: list[str | None] = []

    def slow(*args: object) -> object:
        monkeypatch.setattr(learner.update, "run_update", real)
        second.tick()
        during.extend(u.state for u in scene.updates())
        with scene.database.write() as session:
            past = clock(session) - timedelta(seconds=1)
            session.execute(sql_update(Update).values(lease_until=past))
        second.tick()  # the first half of the rollouts
        second.tick()  # the second
        return real(*args)

    monkeypatch.setattr(learner.update, "run_update", slow)
    first.tick()

    assert during == ["running"]
    lost, *done = scene.updates()
    assert (lost.state, lost.owner) == ("failed", first.owner)
    assert [(u.state, u.owner) for u in done] == [("done", second.owner)] * 2
    assert scene.states() == {("trained", None): len(rollouts)}
    assert len(scene.events("lease_lost")) == 1
    assert [path.name for path in scene.checkpoints()] == sorted(str(u.id) for u in done)
    on_disk = {p.name for p in (scene.settings.artifacts_dir / "p" / "versions").iterdir() if p.is_dir()}
    assert on_disk == {v.adapter_name for v in scene.versions()}

    scene.rollouts(4)
    first.tick()
    assert scene.updates()[-1].state == "done"
    assert scene.updates()[-1].owner == first.owner
    assert scene.policy().updates_done == 3


@in_both_ways_to_train
def test_a_poisoned_rollout_is_found_and_skipped(scene: Scene, new_worker: NewWorker) -> None:
    good = scene.rollouts(2)
    poison = scene.rollout(poison=True)
    good.append(scene.rollout())
    worker = new_worker()
    for _ in range(8):
        worker.tick()
    assert scene.states() == {("trained", None): 3, ("skipped", "update_failed"): 1}
    failed = [u for u in scene.updates() if u.state == "failed"]
    # four, two, then three times alone
    assert len(failed) == 5
    assert all("IndexError" in (u.error or "") for u in failed)
    trained = {name for u in scene.updates() if u.state == "done" for name in (u.provenance or {})["rollouts"]}
    assert trained == {str(rollout) for rollout in good}
    assert str(poison) not in trained
    assert len(scene.events("update_failed")) == 5


@in_both_ways_to_train
def test_a_full_disk_blames_no_rollout(scene: Scene, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.worker, "REST_S", 0.0)
    scene.rollouts(4)
    folder = scene.settings.artifacts_dir / "p" / "checkpoints"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    worker = new_worker()
    for _ in range(4):
        worker.tick()
    assert scene.states() == {("ready", None): 4}
    assert [u.state for u in scene.updates()] == ["failed"] * 4
    assert "could not be written" in (scene.updates()[0].error or "")
    folder.unlink()
    worker.tick()
    assert scene.states() == {("trained", None): 4}


def test_after_such_an_error_the_learner_rests(scene: Scene, new_worker: NewWorker) -> None:
    scene.rollouts(4)
    folder = scene.settings.artifacts_dir / "p" / "checkpoints"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    worker = new_worker()
    worker.tick()
    worker.tick()
    assert len(scene.updates()) == 1
    reason = scene.policy().idle_reason or ""
    assert reason.startswith("resting: The files of an update could not be written: ")
    assert reason.endswith("; tries again in 30 s")
    folder.unlink()
    new_worker().tick()
    assert scene.policy().idle_reason is None


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", b"PK\x03\x04 no archive", None])
def test_a_damaged_checkpoint_blames_no_rollout(scene: Scene, new_worker: NewWorker, content: bytes | None) -> None:
    scene.rollouts(4)
    new_worker().tick()
    training = scene.settings.artifacts_dir / "p" / "checkpoints" / str(scene.policy().checkpoint_update_id)
    training /= "training.pt"
    training.write_bytes(training.read_bytes()[:-200] if content is None else content)
    scene.rollouts(4)
    new_worker().tick()
    assert scene.states() == {("trained", None): 4, ("ready", None): 4}
    assert f"{training} cannot be read" in (scene.updates()[-1].error or "")
    assert (scene.policy().idle_reason or "").startswith("resting: The learner's state could not be loaded: ")


def test_settings_beyond_the_learner_blame_no_rollout(scene: Scene, new_worker: NewWorker) -> None:
    """What was stored before such a seed was refused, and claimed by another release of this code."""
    scene.rollouts(4)
    new_worker().tick()
    scene.rollouts(4)
    claim_settings = LEARNING.model_copy(update={"seed": 2**70})
    worker = new_worker()

    def overflowing(value: object) -> object:
        return claim_settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.state.LearningSettings.model_validate", overflowing)
        worker.tick()
    assert scene.states() == {("trained", None): 4, ("ready", None): 4}


@in_both_ways_to_train
@pytest.mark.parametrize("damage", ["missing", "another update's critic", "another head"])
def test_a_checkpoint_that_does_not_belong_together_is_refused(
    scene: Scene, new_worker: NewWorker, damage: str
) -> None:
    scene.rollouts(8)
    worker = new_worker()
    worker.tick()
    older = scene.settings.artifacts_dir / "p" / "checkpoints" / str(scene.policy().checkpoint_update_id)
    worker.tick()
    newest = scene.settings.artifacts_dir / "p" / "checkpoints" / str(scene.policy().checkpoint_update_id)
    if damage == "missing":
        (newest / "training.pt").unlink()
    elif damage == "another update's critic":
        shutil.copy(older / "value.safetensors", newest)
    else:
        with scene.database.write() as session:
            session.execute(sql_update(Policy).values(head=0))
    scene.rollouts(4)
    new_worker().tick()
    assert scene.states() == {("trained", None): 8, ("ready", None): 4}
    error = scene.updates()[-1].error or ""
    assert {"missing": "missing", "another update's critic": "holds", "another head": "not the head"}[damage] in error


def test_a_policy_that_cannot_be_prepared_does_not_stop_the_others(
    scene: Scene, new_worker: NewWorker, tmp_path: Path
) -> None:
    with scene.database.write() as session:
        session.add(Policy(name="a", base_model=str(tmp_path / "nowhere"), settings=LEARNING.model_dump(mode="json")))
    scene.rollouts(4)
    new_worker().tick()
    assert scene.states() == {("trained", None): 4}
    new_worker().tick()  # another process, which does not rest, fails in the same words: said once
    (event,) = scene.events("prepare_failed")
    assert "Version 0 of a" in event.message
    with scene.database.read() as session:
        assert (get_policy(session, "a").idle_reason or "").startswith("resting: Version 0 of a could not be written")


def test_a_policy_whose_turn_fails_does_not_starve_the_others(
    scene: Scene, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick says so, and the next one begins behind that policy."""
    with scene.database.write() as session:
        session.add(Policy(name="a", base_model="/nowhere", settings={}, head=0, id=UUID(int=1)))
    scene.rollouts(4)
    claim_update = learner.worker.claim_update

    def claim(session: Session, policy_id: UUID, **changes: Any) -> Claim | Idle:
        if policy_id == UUID(int=1):
            raise LookupError("its head has no row")
        return claim_update(session, policy_id, **changes)

    monkeypatch.setattr(learner.worker, "claim_update", claim)
    worker = new_worker()
    for _ in range(2):
        with pytest.raises(LookupError, match="no row"):
            worker.tick()
    assert scene.states() == {("trained", None): 4}


@in_both_ways_to_train
def test_files_of_crashed_updates_are_swept(scene: Scene, new_worker: NewWorker) -> None:
    """Old files that nothing refers to go after the next commit; young ones may belong to an update under way."""
    worker = new_worker()
    worker.tick()
    versions = Path(scene.versions()[0].path).parent
    checkpoints = versions.parent / "checkpoints"
    old = [versions / "p-v1-crashed", versions / ".tmp-p-v1-crashed", checkpoints / ".tmp-crashed"]
    young = [versions / "p-v1-now", checkpoints / ".tmp-now"]
    long_ago = time.time() - ORPHANED_AFTER_S - 60
    for path in old + young:
        path.mkdir(parents=True)
        (path / "weights").write_text("half")
    for path in [*old, *versions.glob(".*.lock"), Path(scene.versions()[0].path)]:
        os.utime(path, (long_ago, long_ago))
    scene.rollouts(20)
    for _ in range(5):
        worker.tick()
    assert [path for path in old if path.exists()] == []
    assert [path for path in young if not path.exists()] == []
    assert all(Path(version.path).is_dir() for version in scene.versions())
    finished = [path.name for path in scene.checkpoints() if not path.name.startswith(".tmp-")]
    assert finished == sorted(str(u.id) for u in scene.updates()[-3:])
