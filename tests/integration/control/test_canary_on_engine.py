"""The canary against the embedded engine: it passes what was swapped, and catches a swap that did not happen."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy import select, update

from app.db.models import Policy, PolicyVersion, Replica
from app.db.session import Database
from app.engine.control_client import ControlClient
from app.policies.canary import NOISE_SAMPLES
from app.policies.deploy import Deployer
from app.policies.learning import Training
from app.rollouts.states import DeploymentState
from tests.contract.engines import start
from tests.contract.reference import Reference, WholeModels
from tests.contract.tiny_model import build_adapter, build_base_model, perturbed_model
from tests.integration.control.conftest import World

PROBES = [[5, 6, 7, 8, 9 + step] for step in range(4)]


def scaled(base: Path, directory: Path, *, seed: int, scale: float) -> Path:
    """An adapter whose distance from the base is set by `scale`: 0 is version 0, small values are small steps."""
    from safetensors.torch import load_file, save_file

    build_adapter(base, directory, seed=seed)
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor * (scale if "lora_B" in name else 1.0) for name, tensor in load_file(file).items()}, file)
    return directory


def steps_away(
    training: Training, base: Path, root: Path, steps: dict[int, float]
) -> tuple[dict[int, Path], Reference | WholeModels]:
    """Versions one behind the other in the same direction, and what a learner knows of them."""
    if training == "lora":
        paths = {number: scaled(base, root / f"v{number}", seed=1, scale=scale) for number, scale in steps.items()}
    else:
        paths = {number: perturbed_model(base, root / f"v{number}", seed=1, scale=s) for number, s in steps.items()}
    named = {f"default-v{number}": path for number, path in paths.items()}
    return paths, Reference(base, named) if training == "lora" else WholeModels(named)


def learner_probe(reference: Reference | WholeModels, name: str) -> list[list[list[float]]]:
    rows = [torch.log_softmax(reference.logits(name, prompt)[-1], -1).topk(20) for prompt in PROBES]
    return [[[int(t), float(v)] for t, v in zip(top.indices, top.values, strict=True)] for top in rows]


def change(world: World, number: int, **values: object) -> None:
    with world.database.write() as session:
        session.execute(update(PolicyVersion).where(PolicyVersion.number == number).values(**values))


@pytest.fixture
def world(tmp_path: Path, training: Training) -> Iterator[World]:
    database = Database(f"sqlite:///{tmp_path / 'evergreen.db'}")
    database.upgrade()
    yield World(database, tmp_path / "versions", training=training)
    database.close()


@pytest.mark.parametrize(("training", "step"), [("lora", 0.05), ("full", 0.002)])
def test_a_swap_that_silently_did_not_happen_is_caught_and_made_good(
    world: World, tmp_path: Path, training: Training, step: float
) -> None:
    base = build_base_model(tmp_path / "base")
    paths, reference = steps_away(training, base, tmp_path, {0: 0.0, 1: step, 2: 2 * step})
    for number in (1, 2):
        world.add_version(number)
    with world.database.write() as session:
        session.execute(update(Policy).values(probes=PROBES, head=0, base_model=str(base)))
        for number, path in paths.items():
            session.execute(
                update(PolicyVersion)
                .where(PolicyVersion.number == number)
                .values(path=str(path), probe=learner_probe(reference, f"default-v{number}"),
                        status="candidate" if number < 2 else "superseded")
            )  # fmt: skip

    with start("embedded", base, tmp_path / "engine.log") as engine:
        deployer, client = Deployer(world.database, [engine.url]), ControlClient()
        if training == "full":  # whole weights have no reference but what was served before them
            change(world, 1, status="superseded")
            deployer.tick(wait_s=60)
            change(world, 1, status="candidate")
        deployer.tick(wait_s=60)  # an adapter of version 0 is only loaded for the canary's sake
        assert world.live == 1
        one = world.deployment(1)
        assert one.verdict == "verified"
        assert one.score == pytest.approx(1.0, abs=0.01)
        with world.database.write() as session:
            noise = session.scalars(select(Replica.noise)).one()
            assert len(noise) == 1
            assert 0 < noise[0] < 1e-4, "float32: engine and reference agree"
            session.execute(update(Replica).values(noise=noise * NOISE_SAMPLES))

        change(world, 2, status="candidate")
        # the engine says 200, and serves the parent
        if training == "lora":
            client.load_adapter(engine.url, "default-v2", str(paths[1]))
        else:
            change(world, 2, path=str(shutil.copytree(paths[1], tmp_path / "the parent's")))
        deployer.tick(wait_s=60)
        two = world.deployment(2)
        assert (two.state, two.verdict) == (DeploymentState.FAILED, "failed")
        assert two.score == pytest.approx(0.0, abs=0.05)
        assert world.live == 1
        if training == "lora":
            assert "default-v2" not in [model.id for model in client.models(engine.url)]
        else:
            assert client.sampled_by(engine.url, [0]) == "default-v1"

        change(world, 2, path=str(paths[2]), next_deploy_at=None)
        deployer.tick(wait_s=60)
        two = world.deployment(2)
        assert (world.live, two.verdict) == (2, "verified")
        assert two.score == pytest.approx(1.0, abs=0.01)
        deployer.close()
        client.close()
