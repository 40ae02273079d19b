"""The learn worker on a real database and real files, with a tiny random model."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from sqlalchemy import select
from sqlalchemy import update as sql_update
from transformers import AutoModelForCausalLM

import learner.worker
from app.db.models import Policy, Rollout
from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.policies.learning import Training
from app.settings import Settings
from learner.artifacts import sha256_of
from learner.lease import LeaseKeeper
from learner.update import train
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, LEARNING_OF, SHARED_PROMPT, Scene

NewWorker = Callable[[], LearnWorker]


WEIGHTS = "adapter_model.safetensors"


def test_rollouts_become_versions(scene: Scene, new_worker: NewWorker) -> None:
    worker = new_worker()
    worker.tick()
    assert [(v.number, v.adapter_name) for v in scene.versions()] == [(0, f"p-v0-{scene.policy_id}")]
    assert scene.policy().idle_reason is not None
    assert "too_few_rollouts" in scene.policy().idle_reason

    scene.rollouts(12)
    for _ in range(4):
        worker.tick()

    assert scene.states() == {("trained", None): 12}
    warm_up, first, second = scene.updates()
    assert [u.state for u in (warm_up, first, second)] == ["done"] * 3
    assert [u.version for u in (warm_up, first, second)] == [None, 1, 2]
    zero, one, two = scene.versions()
    assert [(v.number, v.parent, v.update_id) for v in (one, two)] == [(1, 0, first.id), (2, 1, second.id)]
    policy = scene.policy()
    assert (policy.head, policy.checkpoint_update_id, policy.updates_done) == (2, second.id, 3)

    weights = []
    for version in (zero, one, two):
        assert Path(version.path).name == version.adapter_name
        assert sha256_of(Path(version.path)) == version.sha256
        weights.append(load_file(Path(version.path) / WEIGHTS))
    assert not any(weights[0][name].any() for name in weights[0] if "lora_B" in name)
    for older, newer in pairwise(weights):
        assert any(not torch.equal(older[name], newer[name]) for name in older)


def test_an_update_says_what_it_did(scene: Scene, new_worker: NewWorker) -> None:
    rollouts = scene.rollouts(4)
    new_worker().tick()
    (done,) = scene.updates()
    assert done.health is not None
    assert done.seconds is not None
    assert done.provenance is not None
    assert 0 <= done.health["mean_reward"] <= 1
    assert done.health["action_tokens"] == 20
    # sampled by plain transformers in float32: learner and sampler agree
    assert done.health["mean_abs_log_ratio"] < 1e-4
    assert {"load", "critic", "policy", "files", "total"} <= done.seconds.keys()
    assert sorted(done.provenance["rollouts"]) == sorted(map(str, rollouts))
    assert done.provenance["libraries"]["torch"] == torch.__version__


def test_probes_are_fixed_once_and_say_what_an_engine_would(
    scene: Scene, new_worker: NewWorker, tiny_model: Path
) -> None:
    scene.rollouts(12)
    worker = new_worker()
    worker.tick()
    probes = scene.policy().probes
    assert probes is not None
    assert len(probes) == 8
    assert all(probe[: len(SHARED_PROMPT)] == SHARED_PROMPT for probe in probes)
    worker.tick()
    worker.tick()
    assert scene.policy().probes == probes

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served = PeftModel.from_pretrained(plain, scene.versions()[0].path)
    for version in scene.versions()[1:]:
        served.load_adapter(version.path, version.adapter_name)
    for version in scene.versions():
        served.set_adapter(version.adapter_name if version.number else "default")
        assert version.probe is not None
        assert [len(position) for position in version.probe] == [20] * 8
        for prompt, position in zip(probes, version.probe, strict=True):
            with torch.no_grad():
                expected = served(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            assert [token for token, _ in position] == expected.topk(20).indices.tolist()
            torch.testing.assert_close(
                torch.tensor([logprob for _, logprob in position]), expected.topk(20).values, atol=1e-4, rtol=0
            )


def test_a_fresh_process_continues_as_if_nothing_had_happened(
    scene: Scene, new_worker: NewWorker, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """Mistake 11: policy, critic, both optimisers and the RNG come back together, bit by bit."""
    scene.rollouts(12)
    worker = new_worker()
    worker.tick()
    worker.tick()
    other = Settings(home=tmp_path / "other", dtype="float32")
    shutil.copytree(settings.home, other.home)
    worker.tick()

    environment = {**os.environ, "EVERGREEN_HOME": str(other.home), "EVERGREEN_DTYPE": "float32"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("DATABASE_URL", "EVERGREEN_DATABASE_URL", "BROKER_URL", "EVERGREEN_BROKER_URL"):
        environment.pop(name, None)
    subprocess.run(
        [sys.executable, "-c", "from learner.tasks import learn_tick; learn_tick()"],
        env=environment, check=True, timeout=120,
    )  # fmt: skip

    def newest(home: Settings) -> Path:
        database = Database(home.database_url)
        with database.read() as session:
            policy = get_policy(session, "p")
        database.close()
        assert (policy.head, policy.updates_done) == (2, 3)
        return home.artifacts_dir / "p" / "checkpoints" / str(policy.checkpoint_update_id)

    here, there = newest(settings), newest(other)
    assert here.name != there.name
    for name in ("policy.safetensors", "value.safetensors"):
        ours, theirs = load_file(here / name), load_file(there / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = (torch.load(path / "training.pt", weights_only=True) for path in (here, there))
    assert torch.equal(ours["rng"], theirs["rng"])
    for name in ("policy_optimiser", "value_optimiser"):
        for key, moments in ours[name]["state"].items():
            for moment, value in moments.items():
                assert torch.equal(value, theirs[name]["state"][key][moment])


def test_memory_that_disagrees_with_the_database_is_loaded_again(scene: Scene, new_worker: NewWorker) -> None:
    """Two workers take turns: each finds that the other has moved the head, and goes on from there."""
    scene.rollouts(16)
    one, two = new_worker(), new_worker()
    for worker in (one, one, two, one):
        worker.tick()
    assert [v.number for v in scene.versions()] == [0, 1, 2, 3]
    checkpoint = scene.settings.artifacts_dir / "p" / "checkpoints" / str(scene.policy().checkpoint_update_id)
    training = torch.load(checkpoint / "training.pt", weights_only=True)
    steps = {int(moments["step"]) for moments in training["value_optimiser"]["state"].values()}
    # four updates; a worker that had gone on from its own memory would have fewer
    assert steps == {4 * LEARNING.critic_steps}
    assert json.loads((checkpoint / "state.json").read_text())["updates_done"] == 4


def test_changed_settings_take_effect_at_the_next_update(scene: Scene, new_worker: NewWorker) -> None:
    scene.rollouts(8)
    worker = new_worker()
    worker.tick()
    changed = LEARNING.model_copy(update={"policy_steps": 1})
    with scene.database.write() as session:
        session.execute(sql_update(Policy).values(settings=changed.model_dump(mode="json")))
    worker.tick()
    first, second = scene.updates()
    assert first.health is not None
    assert second.health is not None
    assert len(second.health["policy_grad_norms"]) == 1


@pytest.mark.parametrize("others", ["lora", "full"])
def test_two_policies_do_not_mix(
    scene: Scene,
    settings: Settings,
    database: Database,
    tiny_model: Path,
    tmp_path: Path,
    new_worker: NewWorker,
    others: Training,
) -> None:
    """One worker, one model in memory, two policies in turn: each goes on from its own head."""
    faster = LEARNING_OF[others].model_copy(update={"policy_lr": 1e-2})
    base = shutil.copytree(tiny_model, tmp_path / "base of its own") if others == "full" else tiny_model
    other = Scene(settings, database, base, faster, name="q", training=others)
    scene.rollouts(8)
    other.rollouts(8)
    worker = new_worker()
    worker.tick()
    worker.tick()
    assert scene.states() == {("trained", None): 16}
    for policy in (scene.policy(), other.policy()):
        assert (policy.head, policy.updates_done) == (1, 2)
        checkpoint = settings.artifacts_dir / policy.name / "checkpoints" / str(policy.checkpoint_update_id)
        version = settings.artifacts_dir / policy.name / "versions" / f"{policy.name}-v1-{policy.checkpoint_update_id}"
        file = WEIGHTS if policy.training == "lora" else "model.safetensors"
        learnt, served = load_file(checkpoint / "policy.safetensors"), load_file(version / file)
        assert all(torch.equal(learnt[name], served[name]) for name in learnt)


def test_stop_claims_nothing_more(scene: Scene, new_worker: NewWorker) -> None:
    scene.rollouts(4)
    worker = new_worker()
    worker.stop()
    worker.tick()
    assert scene.updates() == []


def test_an_update_that_a_stop_cannot_wait_for_blames_no_rollout(
    scene: Scene, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is told to stop while it trains, and the update takes longer than it is given."""
    rollouts = scene.rollouts(4)
    worker = new_worker()
    worker.tick()  # the critic's warm-up
    scene.rollouts(4)
    monkeypatch.setattr(learner.worker, "FINISHES_WITHIN_S", 0.0)
    monkeypatch.setattr(learner.worker, "LeaseKeeper", partial(LeaseKeeper, every_s=0.01))
    given_back = threading.Event()
    fail = learner.worker.fail_update

    def failing(*args: object, **kwargs: object) -> None:
        fail(*args, **kwargs)  # type: ignore[arg-type]
        given_back.set()

    def slow(*args: object) -> object:
        worker.stop()
        assert given_back.wait(30)
        return train(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(learner.worker, "fail_update", failing)
    monkeypatch.setattr(learner.worker, "train", slow)
    worker.tick()
    warm_up, stopped = scene.updates()
    assert (warm_up.state, stopped.state) == ("done", "failed")
    assert "the learner was stopped" in (stopped.error or "")
    assert scene.states() == {("trained", None): len(rollouts), ("ready", None): 4}
    with scene.database.read() as session:
        assert {r.retry_group for r in session.scalars(select(Rollout))} == {None}
    assert scene.policy().head == 0
    new_worker().tick()
    assert scene.policy().head == 1
