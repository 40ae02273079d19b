from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import torch

from app.engine.embedded.detokenizer import Detokenizer
from app.engine.embedded.engine import Engine
from app.engine.embedded.options import EngineOptions
from app.engine.embedded.sequence import Output, SampledToken, SamplingParams, Sequence
from tests.contract.reference import Reference
from tests.contract.tiny_model import build_adapter, build_base_model


@dataclass(frozen=True)
class Files:
    base: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("engine-models")
    base = build_base_model(root / "base")
    return Files(base, {name: build_adapter(base, root / name, seed=i) for i, name in enumerate(("one", "two"))})


@pytest.fixture(scope="session")
def reference(files: Files) -> Reference:
    return Reference(files.base, files.adapters)


@dataclass
class Driver:
    """Steps an engine by hand and keeps what each step gave."""

    engine: Engine
    steps: list[dict[str, Output]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def on(cls, base: Path, **options: object) -> "Driver":
        """An engine without adapters."""
        settings = {"dtype": "float32", "threads": 1} | options
        return cls(Engine(EngineOptions(base, "base", **settings)))  # type: ignore[arg-type]

    def add(self, prompt: list[int], model: str = "base", **sampling: object) -> str:
        adapter = None if model == "base" else self.engine.adapters.get(model)
        params = SamplingParams(**({"max_tokens": 8, "seed": 0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
        name = f"{next(self.numbers)}"
        detokenizer = Detokenizer(self.engine.tokenizer, prompt)
        self.engine.add(Sequence(name, adapter, prompt, params, detokenizer))
        return name

    def step(self) -> dict[str, Output]:
        self.steps.append({output.request_id: output for output in self.engine.step()})
        return self.steps[-1]

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def tokens(self, name: str) -> list[SampledToken]:
        return [s[name].token for s in self.steps if name in s and s[name].token is not None]

    def finish(self, name: str) -> str | None:
        return next((s[name].finish_reason for s in self.steps if name in s and s[name].finish_reason), None)

    def step_of_first_token(self, name: str) -> int:
        return next(i for i, s in enumerate(self.steps) if name in s)

    def step_of_end(self, name: str) -> int:
        return next(i for i, s in enumerate(self.steps) if name in s and s[name].finish_reason)


def make_driver(files: Files, **options: object) -> Driver:
    """An engine with the given options; adapters "one" and "two" are loaded."""
    engine = Engine(EngineOptions(files.base, "base", dtype="float32", threads=1, **options))  # type: ignore[arg-type]
    for name, path in files.adapters.items():
        engine.adapters.load(name, str(path))
    return Driver(engine)


@pytest.fixture
def drive(files: Files) -> Callable[..., Driver]:
    return lambda **options: make_driver(files, **options)
