"""What a test of the store needs to tell a story: a policy, keys, and calls in a few words."""

from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db.models import ApiKey, Feedback, Interaction, Policy, PolicyVersion, Rollout, Update
from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy, lock_policy
from app.db.repositories.versions import NewVersion, add_version_zero
from app.db.session import Database
from app.db.types import clock
from app.feedback.rules import NewFeedback, apply_feedback
from app.policies.learning import LearningSettings
from app.rollouts.claimed import Claim
from app.rollouts.learning import Idle, UpdateDone, claim_update, commit_update, fail_update
from app.rollouts.lifecycle import Begun, Completed, NewInteraction, begin_interaction, complete_interaction
from app.rollouts.states import SkipReason

T = TypeVar("T")

SMALL = LearningSettings(rollouts_per_update=4, min_rollouts=2, min_rollouts_after_wait=1, max_staleness=2)


class World:
    def __init__(self, database: Database, settings: LearningSettings = SMALL) -> None:
        self.database = database
        with database.write() as session:
            self.policy_id = create_policy(session, name="p", base_model="/models/m", settings=settings).id
            add_version_zero(session, self.policy_id, path="/a/p-v0", sha256="0" * 64, adapter_name="p-v0")
            self.key = create_key(session, name="agent", scopes=["inference", "feedback"])[0]
            self.judge = create_key(session, name="judge", scopes=["feedback"])[0]

    def write(self, work: Callable[[Session], T]) -> T:
        with self.database.write() as session:
            return work(session)

    def on(self, database: Database) -> "World":
        """The same world through another process's eyes."""
        other = copy(self)
        other.database = database
        return other

    def begin(
        self,
        rollout: str | None = None,
        prompt: Sequence[int] = (1, 2, 3),
        *,
        key: ApiKey | None = None,
        version: int = 0,
        untrainable: SkipReason | None = None,
        tags: dict[str, Any] | None = None,
    ) -> Begun:
        new = NewInteraction(
            id=uuid7(),
            policy_id=self.policy_id,
            key_id=(key or self.key).id,
            client_rollout_id=rollout,
            version=version,
            prompt_ids=np.array(prompt, np.int32),
            temperature=1.0,
            sampling={"temperature": 1.0},
            untrainable=untrainable,
            detail=None,
            request=b"{}",
            replica="http://engine",
            tags=tags or {},
        )
        return self.write(lambda session: begin_interaction(session, new))

    def complete(self, interaction: UUID, completion: Sequence[int] = (4, 5), version: int = 0, **changes: Any) -> None:
        done = completed(completion, version=version, **changes)
        self.write(lambda session: complete_interaction(session, interaction, done))

    def call(
        self,
        rollout: str | None = None,
        prompt: Sequence[int] = (1, 2, 3),
        completion: Sequence[int] = (4, 5),
        *,
        version: int = 0,
        **changes: Any,
    ) -> Begun:
        """A whole interaction."""
        begun = self.begin(rollout, prompt, version=version, **changes)
        self.complete(begun.interaction_id, completion, version)
        return begun

    def feedback(
        self,
        value: float | None = None,
        *,
        rollout: UUID | str | None = None,
        interaction: UUID | None = None,
        key: ApiKey | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        new = NewFeedback(
            rollout_id=None if rollout is None else str(rollout),
            interaction_id=None if interaction is None else str(interaction),
            value=value,
            body_sha256=changes.pop("body_sha256", "b" * 64),
            **changes,
        )
        return self.write(lambda session: apply_feedback(session, key or self.key, new))

    def feedback_statuses(self) -> list[tuple[float | None, str]]:
        with self.database.read() as session:
            return [(row.value, row.status) for row in session.scalars(select(Feedback).order_by(Feedback.id))]

    def rewarded(self, value: float = 1.0, *, version: int = 0) -> UUID:
        """A one-call rollout with its reward: ready. Returns its id."""
        rollout_id = self.call(version=version).rollout_id
        self.feedback(value, rollout=rollout_id)
        return rollout_id

    def claim(self, owner: str = "learner", **changes: Any) -> Claim | Idle:
        return self.write(lambda session: claim_update(session, self.policy_id, owner=owner, **changes))

    def configure(self, **changes: Any) -> None:
        with self.database.write() as session:
            policy = lock_policy(session, self.policy_id)
            policy.settings = LearningSettings.model_validate(policy.settings | changes).model_dump(mode="json")

    def idle_reason(self, owner: str = "learner") -> str:
        outcome = self.claim(owner)
        assert isinstance(outcome, Idle), outcome
        return outcome.reason

    def fail(self, claim: Claim, error: str = "it broke") -> None:
        with self.database.write() as session:
            fail_update(session, claim.update_id, "learner", error)

    def batch(self, owner: str = "learner") -> Claim:
        claim = self.claim(owner)
        assert isinstance(claim, Claim), claim
        return claim

    def commit(self, claim: Claim, *, owner: str = "learner", version: bool = True) -> int | None:
        finished = done(claim, version=version)
        return self.write(lambda session: commit_update(session, claim.update_id, owner, finished))

    def new_version(self) -> int:
        """Train two fresh rollouts into the next version."""
        for _ in range(2):
            self.rewarded(version=self.policy().head or 0)
        number = self.commit(self.batch())
        assert number is not None
        return number

    def policy(self) -> Policy:
        with self.database.read() as session:
            return session.get_one(Policy, self.policy_id)

    def rollout(self, rollout_id: UUID) -> Rollout:
        with self.database.read() as session:
            return session.get_one(Rollout, rollout_id)

    def state(self, rollout_id: UUID) -> tuple[str, str | None]:
        rollout = self.rollout(rollout_id)
        return rollout.state, rollout.reason

    def interaction(self, interaction_id: UUID) -> Interaction:
        with self.database.read() as session:
            return session.get_one(Interaction, interaction_id)

    def age_rollout(self, rollout_id: UUID, seconds: float) -> None:
        """Let time pass for one rollout: nothing has happened to it for so long."""
        with self.database.write() as session:
            then = clock(session) - timedelta(seconds=seconds)
            session.execute(update(Rollout).where(Rollout.id == rollout_id).values(active_at=then))
            session.execute(
                update(Rollout).where(Rollout.id == rollout_id, Rollout.ready_at.is_not(None)).values(ready_at=then)
            )
            session.execute(update(Interaction).where(Interaction.rollout_id == rollout_id).values(started_at=then))

    def expire(self, claim: Claim) -> None:
        with self.database.write() as session:
            then = clock(session) - timedelta(seconds=1)
            session.execute(update(Update).where(Update.id == claim.update_id).values(lease_until=then))


def completed(
    completion: Sequence[int] = (4, 5),
    *,
    version: int = 0,
    logprobs: Sequence[float] | str | None = "whole",
    labelled: tuple[tuple[str, int], ...] | None = None,
) -> Completed:
    ids = np.array(completion, np.int32)
    values = np.full(len(ids), -0.5, np.float32) if logprobs == "whole" else logprobs
    return Completed(
        completion_ids=ids,
        logprobs=None if values is None else np.array(values, np.float32),
        finish_reason="stop",
        response=b"{}",
        version=version,
        replica="http://engine",
        first_token_at=None,
        labelled=labelled,
    )


def done(claim: Claim, *, version: bool = True) -> UpdateDone:
    number = claim.head.number + 1
    name = f"p-v{number}-{claim.update_id}"
    return UpdateDone(
        version=NewVersion(name, f"/a/{name}", "1" * 64) if version else None,
        health={"ev_after": 0.5},
        seconds={"policy": 1.0},
        provenance={"seed": 0},
    )


def version_row(policy: Policy, number: int, parent: int, status: str = "candidate") -> PolicyVersion:
    name = f"p-v{number}-{uuid7()}"
    return PolicyVersion(
        policy_id=policy.id, number=number, parent=parent, adapter_name=name, path=name, sha256="2" * 64, status=status
    )
