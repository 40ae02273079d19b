"""What the learner's tests tell their stories with."""

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import numpy as np
import torch
from sqlalchemy import func, select
from transformers import AutoModelForCausalLM
from uuid_utils.compat import uuid7

from app.db.models import Event, Policy, PolicyVersion, Rollout, Update
from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy
from app.db.session import Database
from app.feedback.rules import NewFeedback, apply_feedback
from app.policies.learning import LearningSettings, Training
from app.rollouts.lifecycle import Completed, NewInteraction, begin_interaction, complete_interaction
from app.rollouts.provenance import Labelled
from app.settings import Settings
from tests.unit.learner.conftest import VOCABULARY, full_settings

LEARNING = LearningSettings(
    rollouts_per_update=4,
    min_rollouts=4,
    critic_warmup_updates=1,
    max_staleness=None,
    lora_rank=4,
    value_rank=4,
    policy_lr=5e-3,
)
FULL = full_settings(
    rollouts_per_update=4, min_rollouts=4, critic_warmup_updates=1, max_staleness=None, policy_lr=1e-4, value_lr=1e-4
)
LEARNING_OF: dict[Training, LearningSettings] = {"lora": LEARNING, "full": FULL}
SHARED_PROMPT = list(range(10, 30))


class Scene:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        model: Path,
        learning: LearningSettings = LEARNING,
        name: str = "p",
        training: Training = "lora",
    ):
        self.settings = settings
        self.database = database
        self.generator = torch.Generator().manual_seed(5)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with database.write() as session:
            self.policy_id = create_policy(
                session, name=name, base_model=str(model), settings=learning, training=training
            ).id
            self.key = create_key(session, name=f"agent of {name}", scopes=["inference", "feedback"])[0]

    def sample(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`count` tokens of version 0 at T = 1 and their log-probs, by plain transformers."""
        ids, logprobs = list(prompt), []
        for _ in range(count):
            with torch.no_grad():
                distribution = self._model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=self.generator))
            ids.append(token)
            logprobs.append(distribution[token].item())
        return ids[len(prompt) :], logprobs

    def rollout(
        self,
        *,
        action_tokens: int = 5,
        poison: bool = False,
        group: str | None = None,
        reward: float | None = None,
        turn_reward: float | None = None,
        finish_reason: str = "stop",
        labelled: Labelled | None = None,
    ) -> UUID:
        """One rewarded call. A poisoned one holds an id that the model does not have.

        group: its tag; the prompt is its own all the same. reward: None: 1 if its first token is even, else 0.
        turn_reward: the call's own, if any, beside the rollout's. labelled: which weights the engine says sampled it.
        """
        prompt = SHARED_PROMPT + torch.randint(3, VOCABULARY, (4,), generator=self.generator).tolist()
        completion, logprobs = self.sample(prompt, action_tokens)
        if poison:
            prompt[-1] = VOCABULARY + 1000
        new = NewInteraction(
            id=uuid7(),
            policy_id=self.policy_id,
            key_id=self.key.id,
            client_rollout_id=None,
            version=0,
            prompt_ids=np.array(prompt, np.int32),
            temperature=1.0,
            sampling={"temperature": 1.0},
            untrainable=None,
            detail=None,
            request=None,
            replica=None,
            tags={} if group is None else {"group": group},
        )
        done = Completed(
            completion_ids=np.array(completion, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=finish_reason,
            response=None,
            version=0,
            replica=None,
            first_token_at=None,
            labelled=labelled,
        )
        with self.database.write() as session:
            begun = begin_interaction(session, new)
            complete_interaction(session, begun.interaction_id, done)
            if turn_reward is not None:
                own = NewFeedback(None, str(begun.interaction_id), turn_reward, body_sha256="b" * 64)
                apply_feedback(session, self.key, own)
            feedback = NewFeedback(
                rollout_id=str(begun.rollout_id),
                interaction_id=None,
                value=float(completion[0] % 2 == 0) if reward is None else reward,
                body_sha256="b" * 64,
            )
            apply_feedback(session, self.key, feedback)
        return begun.rollout_id

    def rollouts(self, count: int) -> list[UUID]:
        return [self.rollout() for _ in range(count)]

    def policy(self) -> Policy:
        with self.database.read() as session:
            return session.get_one(Policy, self.policy_id)

    def versions(self) -> list[PolicyVersion]:
        with self.database.read() as session:
            return list(session.scalars(select(PolicyVersion).order_by(PolicyVersion.number)))

    def updates(self) -> list[Update]:
        with self.database.read() as session:
            return list(session.scalars(select(Update).order_by(Update.id)))

    def events(self, kind: str) -> list[Event]:
        with self.database.read() as session:
            return list(session.scalars(select(Event).where(Event.kind == kind)))

    def states(self) -> dict[tuple[str, str | None], int]:
        """How many rollouts are in each state, with its reason."""
        with self.database.read() as session:
            rows = session.execute(
                select(Rollout.state, Rollout.reason, func.count()).group_by(Rollout.state, Rollout.reason)
            )
            return {(state, reason): count for state, reason, count in rows}

    def newest_checkpoint(self) -> Path:
        return self.settings.artifacts_dir / "p" / "checkpoints" / str(self.policy().checkpoint_update_id)

    def checkpoints(self) -> list[Path]:
        return sorted((self.settings.artifacts_dir / "p" / "checkpoints").iterdir())
