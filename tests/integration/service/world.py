"""A gateway with its database and one policy, as an operator would have set it up, and clients for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import openai
from fastapi import FastAPI
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db.models import Deployment, Interaction, Policy, PolicyVersion, Replica, Rollout
from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy
from app.db.repositories.versions import NewVersion, add_version_zero, append_version
from app.db.session import Database
from app.main import create_app
from app.policies.learning import LearningSettings
from app.rollouts.states import DeploymentState
from app.settings import Settings


@dataclass
class World:
    database: Database
    settings: Settings
    policy_id: UUID
    secrets: dict[str, str]
    """By what the key may do: all, inference, feedback, admin."""
    app: FastAPI
    """The gateway."""
    replica_id: UUID | None = None
    """The fake engine's."""
    url: str = ""
    """Where the gateway is served."""

    def http(self, key: str | None = "all", **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.secrets[key]}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, **options)

    def openai(self, key: str = "all") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.secrets[key], max_retries=0, timeout=30)

    def interaction(self, identifier: str | UUID) -> Interaction:
        with self.database.read() as session:
            return session.get_one(Interaction, UUID(str(identifier)))

    def rollout(self, identifier: str | UUID) -> Rollout:
        with self.database.read() as session:
            return session.get_one(Rollout, UUID(str(identifier)))

    def all_interactions(self) -> list[Interaction]:
        with self.database.read() as session:
            return list(session.query(Interaction).order_by(Interaction.id))

    def flush(self) -> None:
        """Returns when everything that the gateway has queued is committed."""
        self.app.state.service.writer.submit(lambda session: None, order=uuid7()).result(30)

    def newest(self) -> Interaction:
        self.flush()
        return self.all_interactions()[-1]

    def add_replica(self, url: str, *versions: int) -> UUID:
        """A healthy engine on which these versions are verified."""
        with self.database.write() as session:
            replica = Replica(url=url, healthy=True)
            session.add(replica)
            session.flush()
            for number in versions:
                deploy(session, replica.id, self.policy_id, number)
            return replica.id

    def set_replica(self, replica_id: UUID, *, healthy: bool) -> None:
        with self.database.write() as session:
            session.get_one(Replica, replica_id).healthy = healthy

    def drop_replica(self, replica_id: UUID) -> None:
        with self.database.write() as session:
            session.query(Deployment).filter_by(replica_id=replica_id).delete()
            session.delete(session.get_one(Replica, replica_id))

    def add_version(self, number: int, replica_id: UUID) -> None:
        with self.database.write() as session:
            new = NewVersion(adapter_name=f"default-v{number}", path=f"/a/v{number}", sha256="0" * 64)
            version = append_version(session, self.policy_id, new, parent=number - 1, update_id=None)  # type: ignore[arg-type]
            assert version.number == number
            deploy(session, replica_id, self.policy_id, number)

    def set_live(self, number: int | None) -> None:
        self.change_policy(live=number)

    def change_policy(self, **values: Any) -> None:
        with self.database.write() as session:
            policy = session.get_one(Policy, self.policy_id)
            for name, value in values.items():
                setattr(policy, name, value)


def deploy(session: Session, replica_id: UUID, policy_id: UUID, number: int) -> None:
    version = session.query(PolicyVersion).filter_by(policy_id=policy_id, number=number).one()
    session.add(Deployment(replica_id=replica_id, version_id=version.id, state=DeploymentState.VERIFIED))


def found_world(home: Path, base_model: Path, *, url: str | None = None, **settings: Any) -> World:
    """A database with the policy `default`, whose version 0 is live but deployed nowhere, and keys."""
    chosen = Settings(home=home, DATABASE_URL=url, **settings)
    database = Database(chosen.database_url)
    database.upgrade()
    with database.write() as session:
        policy = create_policy(
            session, name="default", base_model=str(base_model), settings=LearningSettings(min_rollouts=2)
        )
        add_version_zero(session, policy.id, path="/a/v0", sha256="0" * 64, adapter_name="default-v0")
        policy.live = 0
        secrets = {
            name: create_key(session, name=name, scopes=scopes)[1]
            for name, scopes in {
                "all": ["inference", "feedback", "admin"],
                "inference": ["inference"],
                "feedback": ["feedback"],
                "admin": ["admin"],
                "other": ["inference", "feedback"],
            }.items()
        }
    return World(database, chosen, policy.id, secrets, create_app(chosen))
