"""The claim of an update: which rollouts, and why not yet."""

from datetime import timedelta
from typing import Any

from sqlalchemy import event, select

from app.db.models import Update, UpdateRollout
from app.db.repositories.policies import create_policy, lock_policy, set_learning
from app.db.repositories.versions import get_version, parent_chain
from app.db.types import clock
from app.rollouts.claimed import Claim
from app.rollouts.learning import (
    Idle,
    claim_update,
)
from app.rollouts.lifecycle import abort_interaction
from tests.integration.store.world import SMALL, World, version_row


def test_a_claim_is_the_batch_as_it_stands(world: World) -> None:
    first = world.call("chat", [1, 2], [3])
    second = world.call("chat", [1, 2, 3, 4], [5, 6])
    world.feedback(0.25, interaction=first.interaction_id)
    world.feedback(1.0, rollout="chat")
    single = world.rewarded(0.5)
    claim = world.batch()
    assert [r.id for r in claim.rollouts] == [single, first.rollout_id]
    chat = claim.rollouts[1]
    assert [i.id for i in chat.interactions] == [first.interaction_id, second.interaction_id]
    assert [i.parent_id for i in chat.interactions] == [None, first.interaction_id]
    assert [i.new_prompt_ids.tolist() for i in chat.interactions] == [[1, 2], [4]]
    assert [i.completion_ids.tolist() for i in chat.interactions] == [[3], [5, 6]]
    assert [i.logprobs.tolist() for i in chat.interactions] == [[-0.5], [-0.5, -0.5]]
    assert [i.reward for i in chat.interactions] == [0.25, None]
    assert (chat.final_reward, chat.total_return, chat.reward_count) == (1.0, 1.25, 2)
    assert (claim.head.number, claim.updates_done, claim.checkpoint_update_id, claim.probes) == (0, 0, None, None)
    with world.database.read() as session:
        rows = session.scalars(select(UpdateRollout).order_by(UpdateRollout.position)).all()
        assert [(r.rollout_id, r.total_return, r.staleness) for r in rows] == [
            (single, 0.5, 0),
            (first.rollout_id, 1.25, 0),
        ]
        update = session.get_one(Update, claim.update_id)
        assert (update.state, update.owner, update.base_version) == ("running", "learner", 0)
        assert update.settings == claim.settings
    assert world.rollout(single).update_id == claim.update_id


def test_untrainable_interactions_come_along_as_context(world: World) -> None:
    world.rewarded()
    trained = world.call("chat", [1], [2])
    cut = world.begin("chat", [1, 2, 3])
    with world.database.write() as session:
        abort_interaction(session, cut.interaction_id, "gone")
    world.feedback(1.0, rollout="chat")
    late = world.begin("chat", [9])
    chat = next(r for r in world.batch().rollouts if r.id == trained.rollout_id)
    assert [(i.id, i.skip_reason) for i in chat.interactions] == [
        (trained.interaction_id, None),
        (cut.interaction_id, "aborted"),
        (late.interaction_id, "after_close"),
    ]
    assert [len(i.completion_ids) for i in chat.interactions] == [1, 0, 0]


def test_the_newest_come_first_and_no_more_than_a_batch(world: World) -> None:
    rollouts = [world.rewarded() for _ in range(6)]
    assert [r.id for r in world.batch().rollouts] == rollouts[:1:-1]


def test_an_update_waits_for_enough_rollouts(world: World) -> None:
    assert world.idle_reason() == "too_few_rollouts: 0 ready, 2 needed (1 once the oldest has waited 60 s)"
    rollout = world.rewarded()
    assert world.idle_reason().startswith("too_few_rollouts: 1 ready")
    world.age_rollout(rollout, 59)
    assert world.idle_reason().startswith("too_few_rollouts: 1 ready")
    world.age_rollout(rollout, 61)
    assert [r.id for r in world.batch().rollouts] == [rollout]


def test_a_batch_smaller_than_the_minimum_still_starts(world: World) -> None:
    world.configure(rollouts_per_update=1, min_rollouts=2)
    world.rewarded()
    assert world.idle_reason().startswith("too_few_rollouts: 1 ready")
    newest = world.rewarded()
    assert [r.id for r in world.batch().rollouts] == [newest]


def test_why_the_learner_idles(world: World) -> None:
    for _ in range(4):
        world.rewarded()
    with world.database.write() as session:
        set_learning(session, "p", False)
    assert world.idle_reason() == "learning_off: switched off by an operator"
    with world.database.write() as session:
        set_learning(session, "p", True)
        version = get_version(session, world.policy_id, 0)
        assert version is not None
        version.status = "rejected"
    assert world.idle_reason().startswith("deploy_failing: version 0 was rejected")
    with world.database.write() as session:
        version = get_version(session, world.policy_id, 0)
        assert version is not None
        version.status = "live"
        fresh = create_policy(session, name="fresh", base_model="/m", settings=SMALL)
        assert claim_update(session, fresh.id, owner="l") == Idle("preparing: version 0 is not written yet")
    assert isinstance(world.claim(), Claim)
    assert world.idle_reason("other").startswith("update_running: ")


def test_the_reason_is_kept_while_an_update_runs_and_cleared_by_the_claim(world: World) -> None:
    world.idle_reason()
    assert (world.policy().idle_reason or "").startswith("too_few_rollouts")
    for _ in range(4):
        world.rewarded()
    world.batch()
    assert world.policy().idle_reason is None
    world.idle_reason("other")
    assert world.policy().idle_reason is None


def test_an_idle_tick_writes_only_what_changed(world: World) -> None:
    world.idle_reason()
    written: list[str] = []
    engine = world.database._writing

    @event.listens_for(engine, "before_cursor_execute")
    def record(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.lstrip().startswith(("SELECT", "BEGIN", "WITH")):
            written.append(statement)

    world.idle_reason()
    assert written == []
    with world.database.write() as session:
        seen = clock(session) - timedelta(seconds=6)
        lock_policy(session, world.policy_id).learner_seen_at = seen
    written.clear()
    world.idle_reason()
    assert len(written) == 1
    assert (world.policy().learner_seen_at or seen) > seen


def test_staleness_counts_steps_on_the_parent_chain(world: World) -> None:
    old, older = world.call("old"), world.call("older")
    world.feedback(1.0, rollout="old", final=False)
    world.new_version()
    world.call("old", [7], version=1)
    world.new_version()
    world.feedback(1.0, rollout="old")
    assert world.rollout(older.rollout_id).state == "open"
    world.rewarded(version=2)
    claim = world.batch()
    assert [i.staleness for r in claim.rollouts if r.id == old.rollout_id for i in r.interactions] == [2, 1]
    with world.database.read() as session:
        rows = {r.rollout_id: r.staleness for r in session.scalars(select(UpdateRollout))}
    assert rows[old.rollout_id] == 2


def test_rollouts_that_are_too_old_are_skipped_on_the_way(world: World) -> None:
    with world.database.write() as session:
        set_learning(session, "p", False)
    old = [world.rewarded() for _ in range(3)]
    with world.database.write() as session:
        set_learning(session, "p", True)
        policy = lock_policy(session, world.policy_id)
        for number in (1, 2, 3):
            session.add(version_row(policy, number, number - 1))
        policy.head = 3
    young = world.rewarded(version=2)
    assert world.idle_reason().startswith("too_few_rollouts: 1 ready")
    assert [world.state(r) for r in old] == [("skipped", "stale")] * 3
    assert world.state(young) == ("ready", None)


def test_samples_of_a_version_that_was_rolled_back_are_off_lineage(world: World) -> None:
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        session.add(version_row(policy, 1, 0))
        session.add(version_row(policy, 2, 1, "rolled_back"))
        session.add(version_row(policy, 3, 1))
        policy.head = 3
        assert parent_chain(session, policy.id, 3) == {3: 0, 1: 1, 0: 2}
        assert parent_chain(session, policy.id, 3, back_to=1) == {3: 0, 1: 1}
        assert parent_chain(session, policy.id, 3, max_steps=1) == {3: 0, 1: 1}
    lost, kept = world.rewarded(version=2), [world.rewarded(version=v) for v in (1, 3)]
    claim = world.batch()
    assert [r.id for r in claim.rollouts] == kept[::-1]
    assert world.state(lost) == ("skipped", "off_lineage")
    # version 3's child gets the next free number and the right parent
    assert world.commit(claim) == 4
    with world.database.read() as session:
        version = get_version(session, world.policy_id, 4)
        assert version is not None
        assert version.parent == 3


def test_without_a_limit_nothing_is_stale(world: World) -> None:
    world.configure(max_staleness=None)
    old = world.call("old").rollout_id
    for _ in range(6):
        world.new_version()
    world.feedback(1.0, rollout="old")
    world.rewarded(version=6)
    assert old in [r.id for r in world.batch().rollouts]
