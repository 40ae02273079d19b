"""A database of each kind, and a policy with versions whose files a fake engine can load."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import select, update

from app.db.models import Deployment, Event, Policy, PolicyVersion, Replica
from app.db.session import Database
from app.engine.replicas import Route, Router
from app.policies.canary import NOISE_SAMPLES
from app.policies.deploy import Deployer
from app.policies.learning import LearningSettings
from app.rollouts.states import VersionStatus
from tests.integration.control.fake_engine import FakeEngine, logprobs, running_engine

PROBES = [[1, 2, 3], [4, 5]]
Make = Callable[..., Deployer]
"""URLs of replicas -> their deployer."""


@pytest.fixture(params=["filesystem", "redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """One broker of each kind."""
    if request.param == "filesystem":
        return "filesystem://"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return f"{url}/13" if request.param == "redis" else url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database with the schema."""
    if request.param == "sqlite":
        opened = Database(f"sqlite:///{tmp_path / 'evergreen.db'}")
        opened.upgrade()
        yield opened
        opened.close()
        return
    server: str = request.getfixturevalue("postgres_url")
    name = f"evergreen_control_{uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]  # a name of ours, not a literal
        opened = Database(f"{server.rsplit('/', 1)[0]}/{name}")
        opened.upgrade()
        yield opened
        opened.close()
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with running_engine() as running:
        yield running


@pytest.fixture
def second_engine() -> Iterator[FakeEngine]:
    with running_engine() as running:
        yield running


class World:
    """One policy, its versions, and shortcuts to what the database says of them."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        name: str = "default",
        base_model: str = "/base",
        training: Literal["lora", "full"] = "lora",
    ):
        self.database = database
        self.folder = folder
        self.name = name
        folder.mkdir(exist_ok=True)
        with database.write() as session:
            policy = Policy(name=name, base_model=base_model, settings=LearningSettings().model_dump(mode="json"),
                            probes=PROBES, training=training)  # fmt: skip
            session.add(policy)
            session.flush()
            self.policy_id = policy.id
        self.add_version(0)

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}-v{number}"

    def add_version(self, number: int) -> UUID:
        """As the learner does: files, then the row, with the probe's log-probs under the learner's own noise."""
        random.seed(number)
        self.path(number).mkdir()
        shifts = {token: random.gauss(0, 0.3) for token in range(20)} if number else {}
        (self.path(number) / "shift.json").write_text(json.dumps(shifts))
        probe = [
            [[token, value + random.gauss(0, 0.001)] for token, value in logprobs(self.path(number), prompt).items()]
            for prompt in PROBES
        ]
        with self.database.write() as session:
            row = PolicyVersion(
                policy_id=self.policy_id, number=number, parent=number - 1 if number else None, sha256="0" * 64,
                adapter_name=f"{self.name}-v{number}", path=str(self.path(number)), probe=probe,
            )  # fmt: skip
            session.add(row)
            session.execute(update(Policy).where(Policy.id == self.policy_id).values(head=number))
            session.flush()
            return row.id

    @property
    def live(self) -> int | None:
        with self.database.read() as session:
            return session.scalars(select(Policy.live).where(Policy.id == self.policy_id)).one()

    def version(self, number: int) -> PolicyVersion:
        with self.database.read() as session:
            return session.scalars(select(PolicyVersion).where(PolicyVersion.number == number)).one()

    def status(self, number: int) -> VersionStatus:
        return VersionStatus(self.version(number).status)

    def deployment(self, number: int) -> Deployment:
        with self.database.read() as session:
            return session.scalars(select(Deployment).join(PolicyVersion).where(PolicyVersion.number == number)).one()

    def replica(self, url: str) -> Replica:
        with self.database.read() as session:
            return session.scalars(select(Replica).where(Replica.url == url)).one()

    def events(self) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(Event.kind).order_by(Event.at)))

    def measure_noise(self) -> None:
        with self.database.write() as session:
            session.execute(update(Replica).values(noise=[0.01] * NOISE_SAMPLES))


def pick(router: Router, policy_id: UUID, number: int | None = None) -> Route:
    return asyncio.run(router.pick(policy_id, number))


@pytest.fixture
def deployer(database: Database) -> Iterator[Make]:
    made: list[Deployer] = []

    def make(*urls: str) -> Deployer:
        made.append(Deployer(database, urls))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    return World(database, tmp_path)


@pytest.fixture
def live(world: World, engine: FakeEngine, deployer: Make) -> Deployer:
    """Version 0 is served."""
    one = deployer(engine.url)
    one.tick(60)
    assert world.live == 0
    engine.calls.clear()
    return one
