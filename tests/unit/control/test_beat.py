"""Ticks go on whatever the wall clock does."""

from collections import Counter
from datetime import timedelta

import pytest

import app.beat
from app.beat import SteadyScheduler
from app.celery_app import DEPLOY_TICK, LEARN_TICK, SWEEP_TICK, create_celery_app
from app.settings import Settings


@pytest.mark.parametrize("step", [timedelta(0), timedelta(hours=-1), timedelta(days=30)])
def test_a_step_of_the_wall_clock_stops_no_tick(monkeypatch: pytest.MonkeyPatch, tmp_path, step: timedelta) -> None:
    clock = [1000.0]
    monkeypatch.setattr(app.beat, "monotonic", lambda: clock[0])
    celery = create_celery_app(Settings(home=tmp_path))
    start, stepped = celery.now(), [timedelta(0)]
    monkeypatch.setattr(celery, "now", lambda: start + timedelta(seconds=clock[0] - 1000) + stepped[0])
    sent: Counter[str] = Counter()
    scheduler = SteadyScheduler(celery, lazy=True)
    scheduler.setup_schedule()
    monkeypatch.setattr(scheduler, "apply_async", lambda entry, **_: sent.update([entry.task]))

    def run(seconds: float) -> None:
        end = clock[0] + seconds
        while clock[0] < end:
            clock[0] += max(0.001, min(scheduler.tick(), 1.0))

    run(5.5)
    stepped[0] = step
    sent.clear()
    run(10)
    assert 9 <= sent[LEARN_TICK] <= 11
    assert 9 <= sent[DEPLOY_TICK] <= 11
    assert 1 <= sent[SWEEP_TICK] <= 3
