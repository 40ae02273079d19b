"""An answer that a limit of length cut off, and whose weights were swapped under it: from its row to its update."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.db.models import UpdateRollout
from app.db.session import Database
from app.policies.learning import LearningSettings
from app.rollouts.claimed import Claim
from app.rollouts.learning import claim_update, fail_update
from app.settings import Settings
from learner.batch import build_trajectories
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, Scene


@pytest.fixture(params=["terminal", "bootstrap"])
def scene(request: pytest.FixtureRequest, settings: Settings, database: Database, tiny_model: Path) -> Scene:
    changes = {"truncation": request.param, "critic_warmup_updates": 0}
    return Scene(settings, database, tiny_model, LearningSettings.model_validate(LEARNING.model_dump() | changes))


def test_a_cut_over_two_versions_is_trained(scene: Scene, new_worker: Callable[[], LearnWorker]) -> None:
    worker = new_worker()
    for _ in range(4):
        scene.rollout(reward=0.0)
    worker.tick()
    assert scene.policy().head == 1
    first, second = (version.adapter_name for version in scene.versions())
    cut = scene.rollout(reward=1.0, finish_reason="length", labelled=((first, 2), (second, 3)))
    for _ in range(3):
        scene.rollout(reward=0.0)

    with scene.database.write() as session:
        claim = claim_update(session, scene.policy_id, owner="another learner")
        assert isinstance(claim, Claim)
        fail_update(session, claim.update_id, "another learner", "it only looked", blame_rollouts=False)
    trajectories = {t.rollout_id: t for t in build_trajectories(claim.rollouts)}
    assert [t.rollout_id for t in trajectories.values() if t.truncated] == [cut]
    assert trajectories[cut].staleness.tolist() == [1, 1, 0, 0, 0]

    worker.tick()
    update = scene.updates()[-1]
    assert (update.state, update.version) == ("done", 2), update.error
    assert update.health is not None
    assert update.health["staleness"] == {"0": 3, "1": 2 + 3 * 5}
    with scene.database.read() as session:
        row = session.get_one(UpdateRollout, (update.id, cut))
    assert (row.staleness, row.action_tokens) == (1, 5)
    assert row.advantage_mean is not None
