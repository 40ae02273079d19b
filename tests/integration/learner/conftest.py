"""A policy on a tiny random model, its rollouts sampled from that model, and workers that train on them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.db.session import Database
from app.policies.learning import Training
from app.settings import Settings
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING_OF, Scene
from tests.unit.learner.conftest import _one_thread, tiny_model

__all__ = ["_one_thread", "tiny_model"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", dtype="float32")


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    database.upgrade()
    yield database
    database.close()


@pytest.fixture
def training() -> Training:
    """Of the scene's policy; what holds for both is parametrized by it."""
    return "lora"


@pytest.fixture
def scene(settings: Settings, database: Database, tiny_model: Path, training: Training) -> Scene:
    return Scene(settings, database, tiny_model, LEARNING_OF[training], training=training)


@pytest.fixture
def new_worker(settings: Settings, database: Database) -> Callable[[], LearnWorker]:
    """Another worker on the same database, as if in another process: it shares no memory with the first."""
    return lambda: LearnWorker(settings, database)
