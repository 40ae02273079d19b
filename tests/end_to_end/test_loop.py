"""The whole loop in both ways to train: requests through the gateway and a real engine, rewards, updates, deployments.

The learner's and the control worker's ticks are called in turn, so that every round is answered by the round's version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import openai
import pytest
import torch
from sqlalchemy import select

from app.db.models import Deployment, Interaction, Policy, PolicyVersion, Update
from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy
from app.db.session import Database
from app.main import create_app
from app.policies.deploy import Deployer
from app.policies.learning import LearningSettings, Training
from app.settings import Settings
from learner.worker import LearnWorker
from tests.contract.engines import start
from tests.contract.reference import Reference, WholeModels
from tests.contract.tiny_model import VOCABULARY, build_base_model
from tests.integration.service.servers import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS, ROLLOUTS = 8, 32
PROMPT = list(range(30, 60))
RATES = {"lora": {"policy_lr": 1e-2, "lora_rank": 8}, "full": {"policy_lr": 4e-3, "value_lr": 4e-3}}
"""Large, for a tiny model that learns in seven updates."""
COMMON = {
    "rollouts_per_update": ROLLOUTS, "min_rollouts": ROLLOUTS, "critic_warmup_updates": 1, "lr_warmup_updates": 0,
    "policy_steps": 3, "critic_steps": 2, "policy_optimiser": "adamw", "centring": 0.0, "lr_follows_shortfall": False,
}  # fmt: skip
"""What keeps a policy slow that still explores (centring, the floor) is left out: there are seven updates."""


@dataclass
class Played:
    training: Training
    base: Path
    database: Database
    rewards: list[float]
    """Mean per round."""
    interactions: list[Interaction]
    """In order."""

    def versions(self) -> list[PolicyVersion]:
        with self.database.read() as session:
            return list(session.scalars(select(PolicyVersion).order_by(PolicyVersion.number)))

    def references(self) -> Reference | WholeModels:
        paths = {str(version.number): Path(version.path) for version in self.versions()}
        return Reference(self.base, paths) if self.training == "lora" else WholeModels(paths)


@pytest.fixture(scope="module", params=["lora", "full"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    training: Training = request.param
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp(training)
    base = build_base_model(root / "base")
    settings = Settings(home=root / "home", dtype="float32")
    database = Database(settings.database_url)
    database.upgrade()
    learning = LearningSettings.model_validate(COMMON | RATES[training], context={"training": training})
    with database.write() as session:
        create_policy(session, name="default", base_model=str(base), settings=learning, training=training)
        secret = create_key(session, name="agent", scopes=["inference", "feedback"])[1]
    learner = LearnWorker(settings, database)
    learner.tick()  # version 0
    with start("embedded", base, root / "engine.log") as engine, serving(create_app(settings)) as server:
        deployer = Deployer(database, [engine.url])
        deployer.tick(wait_s=120)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0, timeout=60)
        generator = torch.Generator().manual_seed(0)
        rewards, ids = [], []
        for _ in range(ROUNDS):
            answered = [ask_and_reward(database, client, generator) for _ in range(ROLLOUTS)]
            ids += [identifier for identifier, _ in answered]
            rewards.append(sum(reward for _, reward in answered) / ROLLOUTS)
            learner.tick()
            deployer.tick(wait_s=120)
        deployer.close()
    with database.read() as session:
        found = {row.id: row for row in session.scalars(select(Interaction))}
    yield Played(training, base, database, rewards, [found[UUID(identifier)] for identifier in ids])
    database.close()


def ask_and_reward(database: Database, client: openai.OpenAI, generator: torch.Generator) -> tuple[str, float]:
    """One token on a prompt of its own; an even one earns 1. The interaction's id and the reward."""
    prompt = PROMPT + torch.randint(3, VOCABULARY, (4,), generator=generator).tolist()
    seed = int(torch.randint(2**31, (1,), generator=generator))
    reply = client.completions.create(model="default", prompt=prompt, max_tokens=1, seed=seed)
    with database.read() as session:
        token = int(session.get_one(Interaction, UUID(reply.id)).completion_ids[0])
    reward = float(token % 2 == 0)
    client.post("/feedback", body={"interaction_id": reply.id, "reward": reward}, cast_to=object)
    return reply.id, reward


def test_the_reward_rises(played: Played) -> None:
    """On what was served; by far more than the 0.09 that the mean of a round is off by."""
    print(played.rewards)
    assert sum(played.rewards[-2:]) / 2 > sum(played.rewards[:2]) / 2 + 0.25


def test_every_round_is_answered_by_the_newest_version(played: Played) -> None:
    """The first two by version 0: an update without a version, the critic's own, lies between them."""
    assert [row.version for row in played.interactions[::ROLLOUTS]] == [0, 0, *range(1, ROUNDS - 1)]
    for first in range(0, len(played.interactions), ROLLOUTS):
        assert len({row.version for row in played.interactions[first : first + ROLLOUTS]}) == 1
    with played.database.read() as session:
        policy = session.scalars(select(Policy)).one()
        updates = list(session.scalars(select(Update).order_by(Update.started_at)))
    assert (policy.head, policy.live) == (ROUNDS - 1, ROUNDS - 1)
    assert [(update.state, update.version) for update in updates] == [
        ("done", number or None) for number in range(ROUNDS)
    ]


def test_the_canary_finds_in_the_engine_what_the_learner_computed(played: Played) -> None:
    with played.database.read() as session:
        rows = session.execute(
            select(PolicyVersion.number, Deployment.verdict, Deployment.score).join(Deployment).order_by("number")
        ).all()
    learned = [(number, verdict, score) for number, verdict, score in rows if number]
    assert [number for number, _, _ in learned] == list(range(1, ROUNDS))
    for number, verdict, score in learned:
        assert (verdict, score) == ("verified", pytest.approx(1.0, abs=0.02)), number


def test_stored_logprobs_are_those_of_the_versions_files(played: Played) -> None:
    """By plain transformers and peft, on every token that was served; and the learner agrees."""
    references = played.references()
    for row in played.interactions:
        expected = references.logprobs(str(row.version), row.new_prompt_ids.tolist(), row.completion_ids.tolist())
        assert row.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    with played.database.read() as session:
        for update in session.scalars(select(Update)):
            assert update.health is not None
            assert update.health["mean_abs_log_ratio_fresh"] < 1e-4
