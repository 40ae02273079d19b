"""Random stories: whatever calls, rewards, closes, sweeps and updates come in whatever order, the log stays true."""

import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import func, select

from app.db.models import Feedback, Interaction, PolicyVersion, Rollout, Update, UpdateRollout
from app.db.session import Database
from app.errors import Conflict
from app.rollouts.claimed import Claim
from app.rollouts.learning import expire_leases, fail_update
from app.rollouts.lifecycle import Begun, abort_interaction, close_rollout
from app.rollouts.states import TRANSITIONS, RolloutState, SkipReason
from app.rollouts.sweeps import sweep_idle, sweep_orphans, sweep_stale
from tests.integration.store.world import SMALL, World, completed

NAMES = st.sampled_from([None, "a", "b", "c"])
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
ANY = st.integers(0, 1000)
REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 1.0])


@cache
def template() -> bytes:
    """A migrated, empty SQLite file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "template.db"
        database = Database(f"sqlite:///{path}")
        database.upgrade()
        database.close()
        return path.read_bytes()


class Story(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "store.db"
        path.write_bytes(template())
        self.database = Database(f"sqlite:///{path}")
        self.world = World(self.database, SMALL.model_copy(update={"min_rollouts": 1}))
        self.begun: list[Begun] = []
        self.acknowledged: dict[UUID, str] = {}
        self.prompts: dict[UUID, list[int]] = {}
        self.names: dict[UUID, str | None] = {}
        self.paths: dict[str | None, list[list[int]]] = {}
        self.states: dict[UUID, RolloutState] = {}
        self.claim: Claim | None = None

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    def running(self) -> list[Begun]:
        return [b for b in self.begun if self.acknowledged[b.interaction_id] == "running"]

    # --- agents

    @rule(name=NAMES, known=ANY, new=TOKENS, version=ANY, opted_out=st.booleans())
    def begin(self, name: str | None, known: int, new: list[int], version: int, opted_out: bool) -> None:
        self._begin(name, known, new, version, opted_out)

    def _begin(self, name: str | None, known: int, new: list[int], version: int, opted_out: bool) -> Begun:
        # most prompts continue something that was said in the same rollout
        paths = [[], *self.paths.get(name, [])]
        prompt = paths[known % len(paths)] + new
        reason = SkipReason.OPTED_OUT if opted_out else None
        served = version % ((self.world.policy().head or 0) + 1)
        begun = self.world.begin(name, prompt, version=served, untrainable=reason)
        self.begun.append(begun)
        self.acknowledged[begun.interaction_id] = "running"
        self.prompts[begun.interaction_id] = prompt
        self.names[begun.interaction_id] = name
        return begun

    @precondition(lambda self: self.running())
    @rule(which=ANY, completion=TOKENS)
    def complete(self, which: int, completion: list[int]) -> None:
        running = self.running()
        self._complete(running[which % len(running)], completion)

    def _complete(self, begun: Begun, completion: list[int]) -> None:
        version = self.world.interaction(begun.interaction_id).version
        self.world.complete(begun.interaction_id, completion, version)
        self.acknowledged[begun.interaction_id] = "completed"
        paths = self.paths.setdefault(self.names[begun.interaction_id], [])
        paths.append(self.prompts[begun.interaction_id] + completion)

    @rule(name=NAMES, known=ANY, new=TOKENS, completion=TOKENS, value=REWARDS)
    def call_and_reward(
        self, name: str | None, known: int, new: list[int], completion: list[int], value: float
    ) -> None:
        begun = self._begin(name, known, new, version=0, opted_out=False)
        self._complete(begun, completion)
        self._reward_turn(begun, value, None)

    @precondition(lambda self: self.running())
    @rule(which=ANY)
    def abort(self, which: int) -> None:
        running = self.running()
        begun = running[which % len(running)]
        with self.database.write() as session:
            abort_interaction(session, begun.interaction_id, "gone", completed([1]))
        self.acknowledged[begun.interaction_id] = "aborted"

    # --- judges

    @precondition(lambda self: self.begun)
    @rule(which=ANY, value=REWARDS, of_turn=st.booleans(), final=st.sampled_from([None, True, False]))
    def reward(self, which: int, value: float, of_turn: bool, final: bool | None) -> None:
        begun = self.begun[which % len(self.begun)]
        if of_turn:
            self._reward_turn(begun, value, final)
        else:
            self.world.feedback(value, final=final, rollout=begun.rollout_id)

    def _reward_turn(self, begun: Begun, value: float, final: bool | None) -> None:
        """What came after its rollout's end is no turn of it, and takes no reward."""
        refused = pytest.raises(Conflict) if begun.untrainable == SkipReason.AFTER_CLOSE else nullcontext()
        with refused:
            self.world.feedback(value, final=final, interaction=begun.interaction_id)

    @precondition(lambda self: self.begun)
    @rule(which=ANY, failed=st.booleans())
    def close(self, which: int, failed: bool) -> None:
        rollout = self.world.rollout(self.begun[which % len(self.begun)].rollout_id)
        if failed:
            self.world.feedback(rollout=rollout.id, outcome="environment_error")
        with self.database.write() as session:
            close_rollout(session, rollout)

    # --- the learner

    @precondition(lambda self: self.claim is None)
    @rule()
    def learn(self) -> None:
        claim = self.world.claim()
        if isinstance(claim, Claim):
            self.claim = claim
            assert all(any(i.skip_reason is None for i in r.interactions) for r in claim.rollouts)

    @precondition(lambda self: self.claim is not None)
    @rule(how=st.sampled_from(["version", "warm-up", "failed", "expired"]))
    def end_update(self, how: str) -> None:
        claim, self.claim = self.claim, None
        assert claim is not None
        if how == "failed":
            with self.database.write() as session:
                fail_update(session, claim.update_id, "learner", "bad luck")
        elif how == "expired":
            self.world.expire(claim)
            with self.database.write() as session:
                assert expire_leases(session) == 1
        else:
            number = self.world.commit(claim, version=how == "version")
            assert number == (claim.head.number + 1 if how == "version" else None)

    # --- time

    @precondition(lambda self: self.begun)
    @rule(which=ANY, seconds=st.sampled_from([61, 601, 1801]))
    def time_passes(self, which: int, seconds: int) -> None:
        self.world.age_rollout(self.begun[which % len(self.begun)].rollout_id, seconds)
        with self.database.write() as session:
            sweep_orphans(session, 600)
            sweep_idle(session, 60, 1800)
            sweep_stale(session)
        for begun in self.running():
            self.acknowledged[begun.interaction_id] = self.world.interaction(begun.interaction_id).state

    # --- what always holds

    @invariant()
    def every_acknowledged_interaction_is_stored_once(self) -> None:
        with self.database.read() as session:
            rows = session.execute(select(Interaction.id, Interaction.state)).all()
        assert sorted((row.id, row.state) for row in rows) == sorted(self.acknowledged.items())

    @invariant()
    def the_log_gives_every_prompt_back(self) -> None:
        with self.database.read() as session:
            rows = {row.id: row for row in session.scalars(select(Interaction))}

        def path(row: Interaction) -> list[int]:
            assert row.completion_ids is not None
            return prompt(row) + row.completion_ids.tolist()

        def prompt(row: Interaction) -> list[int]:
            before = path(rows[row.parent_id]) if row.parent_id else []
            return before + row.new_prompt_ids.tolist()

        for identifier, expected in self.prompts.items():
            assert prompt(rows[identifier]) == expected

    @invariant()
    def states_follow_the_table(self) -> None:
        with self.database.read() as session:
            rows = session.execute(select(Rollout.id, Rollout.state, Rollout.reason)).all()
        for row in rows:
            before, after = self.states.get(row.id, RolloutState.OPEN), RolloutState(row.state)
            steps = {before} | TRANSITIONS[before]
            # one rule may take a rollout two steps: a failed update gives it back, and a sweep takes it
            assert after in steps | {to for step in steps for to in TRANSITIONS[step]}
            assert (row.reason is not None) == (after is RolloutState.SKIPPED)
            self.states[row.id] = after

    @invariant()
    def no_rollout_is_trained_twice(self) -> None:
        with self.database.read() as session:
            trained = session.execute(
                select(UpdateRollout.rollout_id, func.count())
                .join(Update, Update.id == UpdateRollout.update_id)
                .where(Update.state == "done")
                .group_by(UpdateRollout.rollout_id)
            ).all()
            states = {row.id: row.state for row in session.execute(select(Rollout.id, Rollout.state))}
        assert all(count == 1 for _, count in trained)
        assert {rollout_id for rollout_id, _ in trained} == {r for r, state in states.items() if state == "trained"}

    @invariant()
    def version_numbers_have_no_gap(self) -> None:
        with self.database.read() as session:
            numbers = sorted(session.scalars(select(PolicyVersion.number)))
        assert numbers == list(range(len(numbers)))
        assert self.world.policy().head == numbers[-1]

    @invariant()
    def returns_are_the_sum_of_what_counts(self) -> None:
        with self.database.read() as session:
            rows = session.scalars(select(Feedback).where(Feedback.status == "applied", Feedback.metric == "reward"))
            counted: dict[UUID, list[float]] = {}
            targets = set()
            for row in rows:
                if row.value is not None:
                    counted.setdefault(row.rollout_id, []).append(row.value)
                    assert (row.rollout_id, row.interaction_id) not in targets
                    targets.add((row.rollout_id, row.interaction_id))
            for rollout in session.scalars(select(Rollout)):
                expected = sum(counted[rollout.id]) if rollout.id in counted else None
                assert rollout.total_return == expected


Story.TestCase.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStory = Story.TestCase
