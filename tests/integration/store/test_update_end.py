"""How an update ends: a commit, or a failure and what is tried again."""

from dataclasses import replace

import pytest
from sqlalchemy import func, select
from uuid_utils.compat import uuid7

from app.db.models import Update, UpdateRollout
from app.db.repositories.policies import lock_policy
from app.db.repositories.versions import get_version
from app.rollouts.learning import (
    Idle,
    LeaseLost,
    RolloutSummary,
    commit_update,
    fail_update,
)
from tests.integration.store.world import World, done, version_row


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
    world.fail(world.batch())
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
            world.fail(outcome)
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
    assert "of a failed update are too old" in world.idle_reason()
    world.idle_reason()
    assert [world.state(r) for r in old] == [("skipped", "stale")] * 2
    assert world.idle_reason().startswith("too_few_rollouts: 0 ready")
