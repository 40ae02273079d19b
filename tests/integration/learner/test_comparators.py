"""The comparators in a learn worker: a running mean that outlives its process, groups from tag to advantage."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import learner.worker
from app.db.models import Update, UpdateRollout
from app.db.session import Database
from app.policies.learning import LearningSettings
from app.settings import Settings
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, Scene

NewWorker = Callable[[], LearnWorker]


@pytest.fixture
def play(settings: Settings, database: Database, tiny_model: Path) -> Callable[..., Scene]:
    """A scene whose policy learns with these changes."""

    def make(**changes: Any) -> Scene:
        chosen = LearningSettings.model_validate(LEARNING.model_dump() | changes)
        return Scene(settings, database, tiny_model, chosen)

    return make


def batches(scene: Scene) -> list[list[UpdateRollout]]:
    """Per done update its rollouts, oldest first."""
    with scene.database.read() as session:
        done = session.scalars(select(Update).where(Update.state == "done").order_by(Update.id)).all()
        return [
            list(
                session.scalars(
                    select(UpdateRollout)
                    .where(UpdateRollout.update_id == update.id)
                    .order_by(UpdateRollout.position.desc())
                )
            )
            for update in done
        ]


def newest_returns(scene: Scene) -> list[float]:
    path = scene.settings.artifacts_dir / "p" / "checkpoints" / str(scene.policy().checkpoint_update_id) / "state.json"
    returns: list[float] = json.loads(path.read_text())["recent_returns"]
    return returns


def test_a_running_mean_goes_on_in_another_process(
    play: Callable[..., Scene], new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four batches of four, a fresh worker for the third, and one whose files cannot be written before the fourth."""
    scene = play(advantage="running_mean")
    worker = new_worker()
    for number in range(4):
        scene.rollouts(4)
        if number == 2:
            worker = new_worker()
        if number == 3:
            with monkeypatch.context() as broken:
                broken.setattr(learner.worker, "write_checkpoint", _disk_full)
                worker.tick()
            worker = new_worker()  # the other one rests
        worker.tick()

    done = batches(scene)
    assert len(done) == 4
    # no update was held back for a critic
    assert [v.number for v in scene.versions()] == [0, 1, 2, 3, 4]
    earlier: list[float] = []
    for batch in done:
        returns = [row.total_return for row in batch]
        for i, row in enumerate(batch):
            compared = earlier or returns[:i] + returns[i + 1 :]
            assert row.advantage_mean == pytest.approx(row.total_return - statistics.fmean(compared), abs=1e-6)
            assert row.advantage_std == pytest.approx(0.0, abs=1e-6)
        earlier += returns
    assert 0 < statistics.fmean(earlier) < 1
    assert newest_returns(scene) == earlier
    health = scene.updates()[-1].health
    assert health is not None
    assert health["ev_after"] is None


def _disk_full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_returns_are_kept_whatever_is_learned_with(play: Callable[..., Scene], new_worker: NewWorker) -> None:
    scene = play()
    scene.rollouts(8)
    worker = new_worker()
    worker.tick()
    worker.tick()
    assert newest_returns(scene) == [row.total_return for batch in batches(scene) for row in batch]


def test_groups_reach_the_advantages_by_their_tag(play: Callable[..., Scene], new_worker: NewWorker) -> None:
    """Eight rollouts in four interleaved groups of two: two updates of two groups each."""
    scene = play(advantage="group", group_size=2)
    group_of = {scene.rollout(group=name): name for name in "abcdabcd"}
    worker = new_worker()
    worker.tick()
    worker.tick()
    assert scene.states() == {("trained", None): 8}
    assert [v.number for v in scene.versions()] == [0, 1, 2]
    seen: set[float] = set()
    for batch in batches(scene):
        returns = {name: [r.total_return for r in batch if group_of[r.rollout_id] == name] for name in "abcd"}
        assert sorted(map(len, returns.values())) == [0, 0, 2, 2]
        for row in batch:
            one, other = returns[group_of[row.rollout_id]]
            # of two returns: half their distance over (distance / sqrt(2))
            expected = 0.0 if one == other else (0.5**0.5 if row.total_return == max(one, other) else -(0.5**0.5))
            assert row.advantage_mean == pytest.approx(expected, abs=1e-5)
            seen.add(expected)
    assert len(seen) > 1
