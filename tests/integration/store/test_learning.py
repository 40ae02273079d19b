"""The claim, the lease, and how an update ends."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import IntegrityError
from uuid_utils.compat import uuid7

from app.db.models import Event, Policy, PolicyVersion, Rollout, Update, UpdateRollout
from app.db.repositories.policies import create_policy, lock_policy, set_learning
from app.db.repositories.versions import get_version, parent_chain
from app.db.session import Database
from app.db.types import clock
from app.policies.learning import LearningSettings
from app.rollouts.claimed import Claim
from app.rollouts.learning import (
    Idle,
    LeaseLost,
    RolloutSummary,
    claim_update,
    commit_update,
    expire_leases,
    fail_update,
    renew_lease,
)
from app.rollouts.lifecycle import abort_interaction
from tests.integration.store.world import SMALL, World, done


def configure(world: World, **changes: Any) -> None:
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        policy.settings = LearningSettings.model_validate(policy.settings | changes).model_dump(mode="json")


def idle(world: World, owner: str = "learner") -> str:
    outcome = world.claim(owner)
    assert isinstance(outcome, Idle), outcome
    return outcome.reason


def fail(world: World, claim: Claim, error: str = "it broke") -> None:
    with world.database.write() as session:
        fail_update(session, claim.update_id, "learner", error)


# --- the claim


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
    assert [i.reward for i in chat.interactions] == [0.25, 0.0]
    assert (chat.final_reward, chat.total_return) == (1.0, 1.25)
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
    assert idle(world) == "too_few_rollouts: 0 ready, 2 needed (1 once the oldest has waited 60 s)"
    rollout = world.rewarded()
    assert idle(world).startswith("too_few_rollouts: 1 ready")
    world.age_rollout(rollout, 59)
    assert idle(world).startswith("too_few_rollouts: 1 ready")
    world.age_rollout(rollout, 61)
    assert [r.id for r in world.batch().rollouts] == [rollout]


def test_a_batch_smaller_than_the_minimum_still_starts(world: World) -> None:
    configure(world, rollouts_per_update=1, min_rollouts=2)
    world.rewarded()
    assert idle(world).startswith("too_few_rollouts: 1 ready")
    newest = world.rewarded()
    assert [r.id for r in world.batch().rollouts] == [newest]


def test_why_the_learner_idles(world: World) -> None:
    for _ in range(4):
        world.rewarded()
    with world.database.write() as session:
        set_learning(session, "p", False)
    assert idle(world) == "learning_off: switched off by an operator"
    with world.database.write() as session:
        set_learning(session, "p", True)
        version = get_version(session, world.policy_id, 0)
        assert version is not None
        version.status = "rejected"
    assert idle(world).startswith("deploy_failing: version 0 was rejected")
    with world.database.write() as session:
        version = get_version(session, world.policy_id, 0)
        assert version is not None
        version.status = "live"
        fresh = create_policy(session, name="fresh", base_model="/m", settings=SMALL)
        assert claim_update(session, fresh.id, owner="l") == Idle("preparing: version 0 is not written yet")
    assert isinstance(world.claim(), Claim)
    assert idle(world, "other").startswith("update_running: ")


def test_the_reason_is_kept_while_an_update_runs_and_cleared_by_the_claim(world: World) -> None:
    idle(world)
    assert (world.policy().idle_reason or "").startswith("too_few_rollouts")
    for _ in range(4):
        world.rewarded()
    world.batch()
    assert world.policy().idle_reason is None
    idle(world, "other")
    assert world.policy().idle_reason is None


def test_an_idle_tick_writes_only_what_changed(world: World) -> None:
    idle(world)
    written: list[str] = []
    engine = world.database._writing

    @event.listens_for(engine, "before_cursor_execute")
    def record(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.lstrip().startswith(("SELECT", "BEGIN", "WITH")):
            written.append(statement)

    idle(world)
    assert written == []
    with world.database.write() as session:
        seen = clock(session) - timedelta(seconds=6)
        lock_policy(session, world.policy_id).learner_seen_at = seen
    written.clear()
    idle(world)
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
    assert idle(world).startswith("too_few_rollouts: 1 ready")
    assert [world.state(r) for r in old] == [("skipped", "stale")] * 3
    assert world.state(young) == ("ready", None)


def version_row(policy: Policy, number: int, parent: int, status: str = "candidate") -> PolicyVersion:
    name = f"p-v{number}-{uuid7()}"
    return PolicyVersion(
        policy_id=policy.id, number=number, parent=parent, adapter_name=name, path=name, sha256="2" * 64, status=status
    )


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
    configure(world, max_staleness=None)
    old = world.call("old").rollout_id
    for _ in range(6):
        world.new_version()
    world.feedback(1.0, rollout="old")
    world.rewarded(version=6)
    assert old in [r.id for r in world.batch().rollouts]


# --- the lease


def test_the_database_admits_one_running_update_per_policy(world: World) -> None:
    with world.database.read() as session:
        now = clock(session)

    def run(state: str) -> None:
        with world.database.write() as session:
            session.add(
                Update(policy_id=world.policy_id, state=state, owner="x", lease_until=now, base_version=0, settings={})
            )

    run("running")
    run("failed")
    with pytest.raises(IntegrityError):
        run("running")


def test_learners_that_claim_at_once_get_one_update(world: World, open_database: Callable[[], Database]) -> None:
    for _ in range(16):
        world.rewarded()
    learners = 4
    barrier = threading.Barrier(learners)
    databases = [open_database() for _ in range(learners)]

    def claim(number: int) -> Claim | Idle:
        barrier.wait(timeout=30)
        with databases[number].write() as session:
            return claim_update(session, world.policy_id, owner=f"learner-{number}")

    with ThreadPoolExecutor(learners) as pool:
        outcomes = list(pool.map(claim, range(learners)))
    assert sum(isinstance(outcome, Claim) for outcome in outcomes) == 1
    assert sum(isinstance(o, Idle) and o.reason.startswith("update_running") for o in outcomes) == learners - 1
    with world.database.read() as session:
        training = session.scalar(select(func.count()).select_from(Rollout).where(Rollout.state == "training"))
    assert training == 4


def test_a_lease_is_renewed_by_its_owner_while_it_runs(world: World) -> None:
    world.rewarded(), world.rewarded()
    claim = world.batch()
    world.expire(claim)
    with world.database.write() as session:
        assert not renew_lease(session, claim.update_id, "thief")
        assert renew_lease(session, claim.update_id, "learner", 30)
        assert expire_leases(session) == 0
    world.commit(claim)
    with world.database.write() as session:
        assert not renew_lease(session, claim.update_id, "learner")


def test_an_expired_lease_gives_its_rollouts_back(world: World) -> None:
    rollouts = [world.rewarded() for _ in range(2)]
    claim = world.batch()
    world.feedback(0.5, rollout=rollouts[0])
    world.expire(claim)
    with world.database.write() as session:
        assert expire_leases(session) == 1
        assert expire_leases(session) == 0
    assert [world.state(r)[0] for r in rollouts] == ["ready", "ready"]
    assert world.rollout(rollouts[0]).total_return == 0.5
    with world.database.read() as session:
        update = session.get_one(Update, claim.update_id)
        assert (update.state, "lease of learner ran out" in (update.error or "")) == ("failed", True)
        assert [e.kind for e in session.scalars(select(Event))] == ["update_failed"]
    with pytest.raises(LeaseLost):
        world.commit(claim)
    with pytest.raises(LeaseLost):
        fail(world, claim)
    assert world.policy().head == 0


def test_the_next_claim_takes_an_expired_lease_over(world: World) -> None:
    world.rewarded(), world.rewarded()
    first = world.batch()
    world.expire(first)
    second = world.claim("successor")
    assert isinstance(second, Claim)
    with pytest.raises(LeaseLost):
        world.commit(first)
    assert world.commit(second, owner="successor") == 1


def test_a_late_lease_that_nobody_took_still_commits(world: World) -> None:
    world.rewarded(), world.rewarded()
    claim = world.batch()
    world.expire(claim)
    assert world.commit(claim) == 1


def test_commit_and_expiry_exclude_each_other(world: World, open_database: Callable[[], Database]) -> None:
    """Whoever comes first, the rollouts are trained with a version, or ready without one; never a mixture."""
    for _ in range(8):
        rollouts = [world.rewarded(version=world.policy().head or 0) for _ in range(2)]
        head = world.policy().head or 0
        claim = world.batch()
        world.expire(claim)
        barrier = threading.Barrier(2)
        databases = [open_database(), open_database()]

        def commit(claim: Claim = claim, barrier: threading.Barrier = barrier, d: Database = databases[0]) -> bool:
            barrier.wait(timeout=30)
            try:
                with d.write() as session:
                    commit_update(session, claim.update_id, "learner", done(claim))
            except LeaseLost:
                return False
            return True

        def expire(barrier: threading.Barrier = barrier, d: Database = databases[1]) -> int:
            barrier.wait(timeout=30)
            with d.write() as session:
                return expire_leases(session)

        with ThreadPoolExecutor(2) as pool:
            committing, expiring = pool.submit(commit), pool.submit(expire)
            committed, expired = committing.result(timeout=60), expiring.result(timeout=60)
        assert committed == (expired == 0)
        assert world.policy().head == head + committed
        assert {world.state(r)[0] for r in rollouts} == {"trained" if committed else "ready"}
        if not committed:
            for _ in range(2):
                world.commit(world.batch())


def test_stored_settings_that_cannot_work_are_a_reason_to_idle_and_blame_no_rollout(world: World) -> None:
    rollouts = [world.rewarded() for _ in range(2)]
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        policy.settings = {**policy.settings, "dis_band": [4.0, 0.2]}
    reason = idle(world)
    assert reason.startswith("settings_invalid: dis_band: ")
    assert world.policy().idle_reason == reason
    assert [world.state(r) for r in rollouts] == [("ready", None)] * 2
    configure(world, dis_band=[0.2, 4.0])
    assert len(world.batch().rollouts) == 2


# --- how it ends


def test_a_commit_stores_everything_at_once(world: World) -> None:
    first, second = world.rewarded(), world.rewarded()
    claim = world.batch()
    finished = replace(
        done(claim),
        probes=[[1, 2], [3]],
        probe_zero=[[[5, -0.1]], [[6, -0.2]]],
        summaries={first: RolloutSummary(2, 0.5, 0.1, 0.25)},
    )
    with world.database.write() as session:
        assert commit_update(session, claim.update_id, "learner", finished) == 1
    policy = world.policy()
    assert (policy.head, policy.live, policy.updates_done) == (1, None, 1)
    assert policy.checkpoint_update_id == claim.update_id
    assert policy.probes == [[1, 2], [3]]
    with world.database.read() as session:
        zero, one = (get_version(session, world.policy_id, n) for n in (0, 1))
        assert zero is not None
        assert one is not None
        assert zero.probe == [[[5, -0.1]], [[6, -0.2]]]
        assert (one.parent, one.update_id, one.status) == (0, claim.update_id, "candidate")
        update = session.get_one(Update, claim.update_id)
        assert (update.state, update.version, update.health) == ("done", 1, {"ev_after": 0.5})
        row = session.get_one(UpdateRollout, (claim.update_id, first))
        assert (row.action_tokens, row.advantage_mean, row.masked_share) == (2, 0.5, 0.25)
    assert [world.state(r)[0] for r in (first, second)] == ["trained", "trained"]
    world.rewarded(version=1), world.rewarded(version=1)
    again = world.batch()
    assert again.probes == ((1, 2), (3,))
    assert (again.head.number, again.updates_done, again.checkpoint_update_id) == (1, 1, claim.update_id)


def test_a_critic_warm_up_makes_no_version(world: World) -> None:
    world.rewarded(), world.rewarded()
    claim = world.batch()
    assert world.commit(claim, version=False) is None
    policy = world.policy()
    assert (policy.head, policy.updates_done, policy.checkpoint_update_id) == (0, 1, claim.update_id)


def test_version_numbers_have_no_gap(world: World) -> None:
    assert [world.new_version() for _ in range(3)] == [1, 2, 3]
    world.rewarded(version=3), world.rewarded(version=3)
    fail(world, world.batch())
    world.commit(world.batch(), version=False)
    assert world.commit(world.batch()) == 4


def test_a_commit_that_cannot_be_stored_changes_nothing(world: World) -> None:
    rollout, _ = world.rewarded(), world.rewarded()
    claim = world.batch()
    for broken in (
        replace(done(claim), health={"k3": float("nan")}),
        replace(done(claim), summaries={uuid7(): RolloutSummary(1, 0.0, 0.0, 0.0)}),
    ):
        with pytest.raises(Exception, match=r"Out of range float|did not claim"), world.database.write() as session:
            commit_update(session, claim.update_id, "learner", broken)
        assert (world.policy().head, world.state(rollout)) == (0, ("training", None))
    assert world.commit(claim) == 1


def test_only_the_owner_ends_an_update(world: World) -> None:
    world.rewarded(), world.rewarded()
    claim = world.batch()
    with pytest.raises(LeaseLost):
        world.commit(claim, owner="thief")
    with pytest.raises(LeaseLost), world.database.write() as session:
        fail_update(session, claim.update_id, "thief", "mine")
    with pytest.raises(LeaseLost), world.database.write() as session:
        commit_update(session, uuid7(), "learner", done(claim))
    world.commit(claim)
    with pytest.raises(LeaseLost):
        world.commit(claim)


def test_a_head_that_moved_meanwhile_refuses_the_commit(world: World) -> None:
    world.new_version()
    world.rewarded(version=1), world.rewarded(version=1)
    claim = world.batch()
    with world.database.write() as session:
        lock_policy(session, world.policy_id).head = 0
    with pytest.raises(LeaseLost, match="head moved from version 1 to 0"):
        world.commit(claim)


def test_a_failed_update_is_tried_again_in_halves_until_the_poison_stands_alone(world: World) -> None:
    rollouts = [world.rewarded() for _ in range(4)]
    poison = rollouts[1]
    batches = []
    while True:
        outcome = world.claim()
        if isinstance(outcome, Idle):
            break
        batches.append(len(outcome.rollouts))
        if poison in [r.id for r in outcome.rollouts]:
            fail(world, outcome)
        else:
            world.commit(outcome)
        if len(batches) == 1:
            world.rewarded()  # ordinary traffic does not join them
    assert world.state(poison) == ("skipped", "update_failed")
    assert [world.state(r) for r in rollouts if r != poison] == [("trained", None)] * 3
    # 4, halves of 2, quarters of 1, and the poison alone three times in all
    assert sorted(batches, reverse=True) == [4, 2, 2, 1, 1, 1, 1]
    with world.database.read() as session:
        counts = session.execute(
            select(UpdateRollout.rollout_id, func.count())
            .join(Update, (Update.id == UpdateRollout.update_id) & (Update.state == "done"))
            .group_by(UpdateRollout.rollout_id)
        ).all()
    assert {count for _, count in counts} == {1}


def test_a_retry_group_that_became_too_old_is_skipped(world: World) -> None:
    old = [world.rewarded() for _ in range(2)]
    claim = world.batch()
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        fail_update(session, claim.update_id, "learner", "x")
        for number in (1, 2, 3):
            session.add(version_row(policy, number, number - 1))
        policy.head = 3
    assert "of a failed update are too old" in idle(world)
    idle(world)
    assert [world.state(r) for r in old] == [("skipped", "stale")] * 2
    assert idle(world).startswith("too_few_rollouts: 0 ready")
