"""Value pretraining: the critic learns from logged rollouts, under the lease, and the next update goes on from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import update as sql_update
from typer.testing import CliRunner

import evergreen.pretrain
import learner.tasks
from app.db.models import Interaction
from app.db.session import Database
from app.policies.learning import LearningSettings, Training
from app.rollouts.learning import Idle, claim_update
from app.settings import Settings, get_settings
from evergreen.cli import app as cli
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING_OF, Scene

NewWorker = Callable[[], LearnWorker]


@pytest.fixture(params=["lora", "full"])
def scene(request: pytest.FixtureRequest, settings: Settings, database: Database, tiny_model: Any) -> Scene:
    training: Training = request.param
    learning = LEARNING_OF[training].model_copy(update={"value_lr": 3e-3})
    return Scene(settings, database, tiny_model, learning, training=training)


def test_the_critic_learns_from_history_and_the_policy_stays(scene: Scene, new_worker: NewWorker) -> None:
    scene.rollouts(8)
    worker = new_worker()
    worker.tick()
    worker.tick()
    scene.rollouts(10)
    before = {name: load_file(scene.newest_checkpoint() / f"{name}.safetensors") for name in ("policy", "value")}
    policy, states = scene.policy(), scene.states()
    assert states == {("trained", None): 8, ("ready", None): 10}

    outcome = worker.pretrain(scene.policy_id, 20)
    update = scene.updates()[-1]
    assert (outcome, update.state, update.version) == (update.id, "done", None), update.error
    assert update.health is not None
    assert update.health["kind"] == "value_pretraining"
    assert (update.health["rollouts"], update.health["epochs"], update.health["steps"]) == (18, 20, 20 * 5)
    assert update.health["ev_after"] > max(0.5, update.health["ev_before"] + 0.1)
    assert scene.states() == states
    assert (scene.policy().head, scene.policy().updates_done) == (policy.head, policy.updates_done + 1)
    (event,) = scene.events("value_pretrained")
    assert f"explained variance {update.health['ev_before']:.3f} before" in event.message

    after = {name: load_file(scene.newest_checkpoint() / f"{name}.safetensors") for name in ("policy", "value")}
    assert all(torch.equal(after["policy"][name], weight) for name, weight in before["policy"].items())
    assert all(not torch.equal(after["value"][name], weight) for name, weight in before["value"].items())

    new_worker().tick()  # another process goes on from that checkpoint
    last = scene.updates()[-1]
    assert (last.state, last.version) == ("done", 2), last.error
    assert (last.provenance or {})["checkpoint"] == str(update.id)
    assert last.health is not None
    assert last.health["ev_before"] > 0.2


def test_it_counts_for_no_warm_up(scene: Scene, new_worker: NewWorker) -> None:
    """Rollouts that are only ready are history too, and stay ready: they are trained next, by the critic alone."""
    worker = new_worker()
    worker.tick()
    scene.rollouts(4)
    for _ in range(3):
        worker.pretrain(scene.policy_id, 1)
    assert scene.states() == {("ready", None): 4}
    worker.tick()
    scene.rollouts(4)
    new_worker().tick()  # what a checkpoint and a row know is enough
    *_, warm_up, first = scene.updates()
    assert [(u.state, u.version) for u in scene.updates()] == [("done", None)] * 4 + [("done", 1)]
    assert warm_up.health is not None
    assert warm_up.health["policy_lr"] is None
    assert first.health is not None
    settings = LearningSettings.model_validate(first.settings)
    full_length = settings.policy_lr * first.health["reward_shortfall"]
    assert settings.lr_warmup_updates == 2
    assert first.health["policy_lr"] == pytest.approx(full_length / 3)


def test_never_beside_a_running_update(scene: Scene, new_worker: NewWorker) -> None:
    worker = new_worker()
    worker.tick()
    scene.rollouts(4)
    with scene.database.write() as session:
        claim = claim_update(session, scene.policy_id, owner="another learner")
    assert not isinstance(claim, Idle)
    scene.rollouts(4)
    outcome = worker.pretrain(scene.policy_id, 1)
    assert isinstance(outcome, Idle)
    assert outcome.reason.startswith(f"update_running: {claim.update_id} by another learner")
    assert [u.owner for u in scene.updates()] == ["another learner"]


def test_without_history_it_says_what_happens_instead(
    scene: Scene, settings: Settings, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a mode of this whole process, which other tests' floats would feel
    monkeypatch.setattr(torch, "set_flush_denormal", lambda _: True)
    new_worker().tick()
    monkeypatch.setenv("EVERGREEN_HOME", str(settings.home))
    monkeypatch.setenv("EVERGREEN_DTYPE", "float32")
    get_settings.cache_clear()
    result = CliRunner().invoke(cli, ["pretrain-value", "--policy", "p"])
    assert result.exit_code == 1
    assert "no_history: p has no trained or ready rollouts; its first 1 updates train the critic alone" in result.output
    scene.rollouts(6)
    result = CliRunner().invoke(cli, ["pretrain-value", "--policy", "p", "--epochs", "2"])
    assert result.exit_code == 0, result.output
    assert "trained on 6 rollouts (30 action tokens) in 4 steps: explained variance" in result.output
    get_settings.cache_clear()


def test_the_task_says_why_it_did_nothing(scene: Scene, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = new_worker()
    monkeypatch.setattr(learner.tasks, "learn_worker", lambda: worker)
    learner.tasks.pretrain_value("p", 1)
    (event,) = scene.events("value_not_pretrained")
    assert event.message.startswith("no_history")
    scene.rollouts(4)
    worker.tick()
    learner.tasks.pretrain_value("p", 1)
    assert len(scene.events("value_pretrained")) == 1


def test_the_learner_is_asked_over_its_queue(scene: Scene, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Sender:
        def send_task(self, name: str, arguments: tuple[str, int], *, queue: str) -> None:
            sent.append((name, arguments, queue))

    monkeypatch.setattr(evergreen.pretrain, "create_celery_app", lambda _: Sender())
    evergreen.pretrain.send_pretraining(settings, "p", 3)
    assert sent == [(learner.tasks.pretrain_value.name, ("p", 3), "learn")]


def test_a_failure_leaves_everything_as_it_was(scene: Scene, new_worker: NewWorker) -> None:
    worker = new_worker()
    scene.rollouts(4)
    worker.tick()
    checkpoint = scene.newest_checkpoint()
    scene.rollout(poison=True)
    worker.pretrain(scene.policy_id, 1)
    assert "IndexError" in (scene.updates()[-1].error or "")
    assert scene.newest_checkpoint() == checkpoint
    assert scene.states() == {("trained", None): 4, ("ready", None): 1}
    assert scene.events("value_pretrained") == []
    (event,) = scene.events("update_failed")
    assert event.message.startswith("A value pretraining failed (IndexError")
    assert event.message.endswith("the critic and all rollouts are as they were.")


def test_a_rollout_that_cannot_be_trained_is_left_out(scene: Scene, new_worker: NewWorker) -> None:
    worker = new_worker()
    worker.tick()
    broken, *_ = scene.rollouts(5)
    with scene.database.write() as session:
        session.execute(sql_update(Interaction).where(Interaction.rollout_id == broken).values(temperature=0.0))
    worker.pretrain(scene.policy_id, 1)
    (update,) = scene.updates()
    assert update.health is not None, update.error
    assert (update.health["rollouts"], update.health["left_out"]) == (4, 1)
    (event,) = scene.events("value_pretrained")
    assert f"Left out: 1, the first since rollout {broken} cannot be trained" in event.message
    with scene.database.write() as session:
        session.execute(sql_update(Interaction).values(temperature=0.0))
    worker.pretrain(scene.policy_id, 1)
    assert "none of 5 rollouts can be trained" in (scene.updates()[-1].error or "")
