"""The learn worker on a policy that trains all of its weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import update as sql_update
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.db.models import Policy
from app.policies.learning import Training
from app.settings import Settings
from learner.artifacts import sha256_of
from learner.worker import LearnWorker
from tests.integration.learner.scene import Scene

NewWorker = Callable[[], LearnWorker]


@pytest.fixture(params=["float32", "bfloat16"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", dtype=request.param)


@pytest.fixture
def training() -> Training:
    return "full"


def test_rollouts_become_model_directories(scene: Scene, new_worker: NewWorker, settings: Settings) -> None:
    scene.rollouts(12)
    worker = new_worker()
    for _ in range(3):
        worker.tick()
    assert scene.states() == {("trained", None): 12}, [u.error for u in scene.updates()]
    assert [(u.state, u.version) for u in scene.updates()] == [("done", None), ("done", 1), ("done", 2)]
    versions = scene.versions()
    assert [v.number for v in versions] == [0, 1, 2]
    older = None
    for version in versions:
        directory = Path(version.path)
        assert directory.name == version.adapter_name
        assert sha256_of(directory) == version.sha256
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in directory.iterdir()
        }
        assert json.loads((directory / "config.json").read_text())["dtype"] == settings.dtype
        assert "evergreen" not in (directory / "config.json").read_text()
        AutoTokenizer.from_pretrained(directory)
        weights = load_file(directory / "model.safetensors")
        if older is not None:
            assert any(not torch.equal(older[name], weights[name]) for name in weights)
        older = weights

    masters = load_file(scene.newest_checkpoint() / "policy.safetensors")
    served = AutoModelForCausalLM.from_pretrained(versions[2].path)
    for name, weight in served.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name].to(weight.dtype), weight), name

    probes = scene.policy().probes
    assert probes is not None
    for version in versions:
        plain = AutoModelForCausalLM.from_pretrained(version.path)
        assert version.probe is not None
        tolerance = 1e-4 if settings.dtype == "float32" else 0.3
        for prompt, position in zip(probes, version.probe, strict=True):
            with torch.no_grad():
                expected = plain(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
            for token, logprob in position:
                assert logprob == pytest.approx(expected[token].item(), abs=tolerance)


def test_another_worker_goes_on_where_the_first_was(scene: Scene, new_worker: NewWorker) -> None:
    """Two workers in turns give the weights that one gives alone: checkpoints hold everything."""
    scene.rollouts(12)
    one, two = new_worker(), new_worker()
    for worker in (one, two, one):
        worker.tick()
    assert [(u.state, u.version) for u in scene.updates()] == [("done", None), ("done", 1), ("done", 2)]
    training = torch.load(scene.newest_checkpoint() / "training.pt", weights_only=True)
    assert {int(moments["step"]) for moments in training["value_optimiser"]["state"].values()} == {3}
    assert {int(moments["step"]) for moments in training["policy_optimiser"]["state"].values()} == {4}


def test_a_checkpoint_of_another_head_is_refused(scene: Scene, new_worker: NewWorker) -> None:
    scene.rollouts(8)
    worker = new_worker()
    worker.tick()
    worker.tick()
    with scene.database.write() as session:
        session.execute(sql_update(Policy).values(head=0))
    scene.rollouts(4)
    new_worker().tick()
    assert "not the head" in (scene.updates()[-1].error or "")
    assert scene.states() == {("trained", None): 8, ("ready", None): 4}
