"""The lease of an update: one at a time, renewed, expired, taken over."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from app.db.models import Event, Rollout, Update
from app.db.repositories.policies import lock_policy
from app.db.session import Database
from app.db.types import clock
from app.rollouts.claimed import Claim
from app.rollouts.learning import (
    Idle,
    LeaseLost,
    claim_update,
    commit_update,
    expire_leases,
    renew_lease,
)
from tests.integration.store.world import World, done


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
        world.fail(claim)
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
    reason = world.idle_reason()
    assert reason.startswith("settings_invalid: dis_band: ")
    assert world.policy().idle_reason == reason
    assert [world.state(r) for r in rollouts] == [("ready", None)] * 2
    world.configure(dis_band=[0.2, 4.0])
    assert len(world.batch().rollouts) == 2
