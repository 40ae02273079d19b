from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.engine.client import ControlClient
from tests.contract.engines import VLLM_PYTHON, RunningEngine, start
from tests.contract.reference import Reference
from tests.contract.tiny_model import build_adapter, build_base_model


@dataclass(frozen=True)
class ModelFiles:
    base: Path
    adapters: dict[str, Path]
    """Served by every engine under test from the start."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    base = build_base_model(root / "base")
    adapters = {name: build_adapter(base, root / name, seed=seed) for seed, name in enumerate(("one", "two"), start=1)}
    return ModelFiles(base, adapters)


@pytest.fixture(scope="session")
def reference(files: ModelFiles) -> Reference:
    return Reference(files.base, files.adapters)


@pytest.fixture(scope="session")
def tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(files.base)


@pytest.fixture(
    scope="session",
    params=["embedded", pytest.param("vllm", marks=pytest.mark.skipif(not VLLM_PYTHON, reason="make vllm-contract"))],
)
def engine(
    request: pytest.FixtureRequest, files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    with start(request.param, files.base, log) as running:
        control = ControlClient()
        for name, path in files.adapters.items():
            control.load_adapter(running.url, name, str(path))
        control.close()
        yield running


@pytest.fixture
def control() -> Iterator[ControlClient]:
    client = ControlClient()
    yield client
    client.close()
