"""Beat's ticks reach a worker over each broker, and go on after kill -9."""

import os
import signal
from pathlib import Path

from app.celery_app import beat_command, worker_command
from tests.integration.control.processes import eventually, process


def ticks(record: Path) -> int:
    return len(record.read_text().splitlines()) if record.exists() else 0


def test_beat_wakes_a_worker_again_after_kill_9(broker_url: str, tmp_path: Path) -> None:
    record = tmp_path / "ticks"
    environment = {"EVERGREEN_HOME": str(tmp_path), "BROKER_URL": broker_url, "TICKS": str(record)}
    command = [arg.replace("learner.tasks", "tests.integration.control.recorded_ticks")
               for arg in worker_command("learn")]  # fmt: skip
    with process(beat_command(), tmp_path / "beat.log", **environment):
        with process(command, tmp_path / "worker.log", **environment) as worker:
            eventually(lambda: ticks(record) >= 3, within_s=30, what="three ticks")
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        seen = ticks(record)
        with process(command, tmp_path / "worker.log", **environment):
            eventually(lambda: ticks(record) >= seen + 3, within_s=30, what="three more ticks")


def test_a_worker_stops_within_seconds_on_sigterm(tmp_path: Path) -> None:
    record = tmp_path / "ticks"
    environment = {"EVERGREEN_HOME": str(tmp_path), "BROKER_URL": "filesystem://", "TICKS": str(record)}
    command = [arg.replace("learner.tasks", "tests.integration.control.recorded_ticks")
               for arg in worker_command("learn")]  # fmt: skip
    with (
        process(beat_command(), tmp_path / "beat.log", **environment) as beat,
        process(command, tmp_path / "worker.log", **environment) as worker,
    ):
        eventually(lambda: ticks(record) >= 1, within_s=30, what="a tick")
        worker.terminate()
        beat.terminate()
        assert worker.wait(timeout=10) == 0
        assert beat.wait(timeout=10) == 0
