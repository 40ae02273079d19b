"""An environment that changes is an event, whichever process trained what came before."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.db.models import UpdateRollout
from app.db.session import Database
from app.policies.learning import LearningSettings
from app.settings import Settings
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, Scene

BATCH = 32


@pytest.fixture
def scene(settings: Settings, database: Database, tiny_model: Path) -> Scene:
    changes = {"rollouts_per_update": BATCH, "min_rollouts": BATCH, "critic_warmup_updates": 10}
    return Scene(settings, database, tiny_model, LearningSettings.model_validate(LEARNING.model_dump() | changes))


def train(scene: Scene, worker: LearnWorker, reward: float) -> list[float]:
    """One batch of one reward; returns its residuals."""
    for _ in range(BATCH):
        scene.rollout(action_tokens=1, reward=reward)
    worker.tick()
    update = scene.updates()[-1]
    with scene.database.read() as session:
        rows = session.query(UpdateRollout).filter_by(update_id=update.id).all()
    assert len(rows) == BATCH
    residuals = [row.residual for row in rows if row.residual is not None]
    assert update.health is not None
    assert update.health["residual_mean"] == pytest.approx(sum(residuals) / BATCH)
    return residuals


def test_a_change_is_noticed_once_and_by_a_new_process_too(scene: Scene, new_worker: Callable[[], LearnWorker]) -> None:
    worker = new_worker()
    # the critic begins at 0: the first residuals are the rewards themselves
    assert train(scene, worker, 1.0) == pytest.approx([1.0] * BATCH, abs=1e-6)
    train(scene, worker, 1.0)
    assert scene.events("drift") == []
    worker = new_worker()
    with capture_logs() as logs:
        after = train(scene, worker, -1.0)
    (event,) = scene.events("drift")
    assert event.policy_id == scene.policy_id
    assert event.message.startswith("p: rewards became less than the critic expects")
    assert event.data["update_id"] == str(scene.updates()[-1].id)
    assert event.data["batch"] == pytest.approx(sum(after) / BATCH)
    assert event.data["before"] > 0.5
    (line,) = [line for line in logs if line["event"] == "drift"]
    assert (line["log_level"], line["message"]) == ("warning", event.message)
    train(scene, worker, -1.0)
    assert len(scene.events("drift")) == 1


def test_two_rewards_are_no_larger_a_surprise_than_one(scene: Scene, new_worker: Callable[[], LearnWorker]) -> None:
    """The critic begins at 0, and the range of a reward is -1 to 1: 1 + 1 - 0 would lie outside of it."""
    for _ in range(BATCH):
        scene.rollout(action_tokens=1, reward=1.0, turn_reward=1.0)
    new_worker().tick()
    (update,) = scene.updates()
    assert update.health is not None
    assert update.health["mean_reward"] == 2.0
    assert update.health["residual_mean"] == pytest.approx(1.0, abs=1e-6)
