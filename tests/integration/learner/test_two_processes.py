"""Two learn workers on one policy, as processes on one broker: the one that loses its lease commits nothing."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import update as sql_update

from app.celery_app import LEARN_TICK, create_celery_app, worker_command
from app.db.models import Update
from app.db.types import clock
from app.rollouts.states import UpdateState
from app.settings import Settings
from tests.integration.control.processes import eventually, process
from tests.integration.learner.scene import Scene


def running_owner(scene: Scene) -> int:
    """The process that trains, waited for."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for update in scene.updates():
            if update.state == UpdateState.RUNNING:
                return int(update.owner.split(":")[1])
        time.sleep(0.002)
    pytest.fail("no update was claimed")


def wake(waker: Celery) -> bool:
    waker.send_task(LEARN_TICK, queue="learn", expires=1.0)
    return True


@pytest.mark.timeout(300)
def test_a_frozen_learner_is_fenced_off_when_it_wakes(
    scene: Scene, settings: Settings, tmp_path: Path, redis_url: str
) -> None:
    broker_url = f"{redis_url}/12"
    waker = create_celery_app(Settings(home=settings.home, broker_url=broker_url))
    environment = {"EVERGREEN_HOME": str(settings.home), "EVERGREEN_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    environment["BROKER_URL"] = broker_url
    rollouts = scene.rollouts(4)
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    with (
        process(worker_command("learn"), logs[0], **environment) as one,
        process(worker_command("learn"), logs[1], **environment) as two,
    ):
        eventually(lambda: all(b"ready." in log.read_bytes() for log in logs), within_s=120, what="both start")
        wake(waker)
        frozen = running_owner(scene)
        assert frozen in (one.pid, two.pid)
        os.kill(frozen, signal.SIGSTOP)
        with scene.database.write() as session:
            session.execute(sql_update(Update).values(lease_until=clock(session) - timedelta(seconds=1)))
        eventually(lambda: wake(waker) and scene.policy().updates_done == 2, within_s=120, what="the other takes over")
        os.kill(frozen, signal.SIGCONT)
        eventually(lambda: bool(scene.events("lease_lost")), within_s=60, what="the first notices")

    lost, *done = scene.updates()
    assert lost.state == UpdateState.FAILED
    assert lost.version is None
    other = two.pid if frozen == one.pid else one.pid
    assert [(u.state, int(u.owner.split(":")[1])) for u in done] == [(UpdateState.DONE, other)] * 2
    assert scene.states() == {("trained", None): len(rollouts)}
    trained = [rollout for u in done for rollout in (u.provenance or {})["rollouts"]]
    assert sorted(trained) == sorted(map(str, rollouts))
    assert [v.number for v in scene.versions()] == [0, 1]
    assert str(lost.id) not in {path.name for path in scene.checkpoints()}
