"""The worker as a process: started as `up` starts it, woken over the filesystem broker, stopped by SIGTERM."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from app.celery_app import LEARN_TICK, create_celery_app, worker_command
from app.settings import Settings
from evergreen.pretrain import send_pretraining
from learner.tasks import NICENESS
from tests.integration.control.processes import eventually, process
from tests.integration.learner.scene import Scene


@contextmanager
def learn_worker(settings: Settings, log: Path) -> Iterator[Popen[bytes]]:
    environment = {"EVERGREEN_HOME": str(settings.home), "EVERGREEN_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    with process(worker_command("learn"), log, **environment) as child:
        eventually(lambda: b"ready." in log.read_bytes(), within_s=120, what="the learn worker starts")
        yield child


@pytest.mark.timeout(300)
def test_a_worker_process_learns_when_it_is_woken(scene: Scene, settings: Settings, tmp_path: Path) -> None:
    scene.rollouts(8)
    waker = create_celery_app(settings)
    with learn_worker(settings, tmp_path / "learn.log") as child:
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == max(NICENESS, os.nice(0))  # it inherits ours

        def trained() -> bool:
            waker.send_task(LEARN_TICK, queue="learn", expires=1.0)
            return scene.policy().head == 1

        eventually(trained, within_s=120, what="version 1")
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0
    assert scene.states() == {("trained", None): 8}
    assert [u.state for u in scene.updates()] == ["done", "done"]


@pytest.mark.timeout(300)
def test_a_worker_process_pretrains_when_it_is_asked(scene: Scene, settings: Settings, tmp_path: Path) -> None:
    waker = create_celery_app(settings)
    with learn_worker(settings, tmp_path / "learn.log"):

        def prepared() -> bool:
            waker.send_task(LEARN_TICK, queue="learn", expires=1.0)
            return scene.policy().head == 0

        eventually(prepared, within_s=120, what="version 0")
        send_pretraining(settings, "p", 1)
        eventually(lambda: bool(scene.events("value_not_pretrained")), within_s=120, what="the refusal")
        scene.rollouts(3)  # too few for an update, whatever ticks are left
        send_pretraining(settings, "p", 2)
        eventually(lambda: bool(scene.events("value_pretrained")), within_s=120, what="the pretraining")
    assert scene.events("value_not_pretrained")[0].message.startswith("no_history")
    (update,) = scene.updates()
    assert (update.state, update.version) == ("done", None)
    assert update.health is not None
    assert (update.health["rollouts"], update.health["epochs"]) == (3, 2)
    assert scene.states() == {("ready", None): 3}
