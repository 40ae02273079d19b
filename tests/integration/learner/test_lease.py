"""The lease of an update is kept by a thread, on the real database."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import update as sql_update
from sqlalchemy.exc import OperationalError

from app.db.models import Update
from app.rollouts.claimed import Claim
from app.rollouts.learning import claim_update, fail_update, renew_lease
from learner.lease import LeaseKeeper
from learner.worker import LearnWorker
from tests.integration.learner.scene import Scene

WAIT_S = 20.0


@pytest.fixture
def claim(scene: Scene, new_worker: Callable[[], LearnWorker]) -> Claim:
    new_worker().tick()  # writes version 0
    scene.rollouts(4)
    with scene.database.write() as session:
        claim = claim_update(session, scene.policy_id, owner="me")
    assert isinstance(claim, Claim)
    return claim


def test_it_is_renewed_until_the_block_ends(scene: Scene, claim: Claim) -> None:
    renewed = threading.Event()

    def renew() -> bool:
        with scene.database.write() as session:
            held = renew_lease(session, claim.update_id, "me", 1000.0)
        renewed.set()
        return held

    before = scene.updates()[0].lease_until
    with LeaseKeeper(renew, every_s=0.01) as lease:
        assert renewed.wait(WAIT_S)
    assert not lease.lost.is_set()
    assert scene.updates()[0].lease_until > before + timedelta(seconds=900)
    renewed.clear()
    assert not renewed.wait(0.1)


def test_it_is_lost_once_somebody_took_it(scene: Scene, claim: Claim) -> None:
    def renew() -> bool:
        with scene.database.write() as session:
            return renew_lease(session, claim.update_id, "me")

    with LeaseKeeper(renew, every_s=0.01) as lease:
        assert not lease.lost.wait(0.1)
        with scene.database.write() as session:
            session.execute(sql_update(Update).values(owner="another"))
        assert lease.lost.wait(WAIT_S)


def test_it_is_lost_once_the_update_was_failed(scene: Scene, claim: Claim) -> None:
    def renew() -> bool:
        with scene.database.write() as session:
            return renew_lease(session, claim.update_id, "me")

    with scene.database.write() as session:
        fail_update(session, claim.update_id, "me", "by hand")
    with LeaseKeeper(renew, every_s=0.01) as lease:
        assert lease.lost.wait(WAIT_S)


@pytest.mark.parametrize(
    "error", [OperationalError("UPDATE updates", {}, Exception("connection refused")), OSError("no locks available")]
)
def test_a_database_that_is_away_for_a_moment_does_not_end_it(error: Exception) -> None:
    tries = threading.Semaphore(0)
    answers = iter([False, False, True])  # whether the database answers; then always

    def renew() -> bool:
        tries.release()
        if not next(answers, True):
            raise error
        return True

    with LeaseKeeper(renew, ttl_s=60.0, every_s=0.01) as lease:
        for _ in range(4):
            assert tries.acquire(timeout=WAIT_S)
    assert not lease.lost.is_set()


def test_a_database_that_stays_away_ends_it() -> None:
    def renew() -> bool:
        raise OperationalError("UPDATE updates", {}, Exception("connection refused"))

    with LeaseKeeper(renew, ttl_s=0.05, every_s=0.01) as lease:
        assert lease.lost.wait(WAIT_S)
