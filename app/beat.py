"""Celery's beat by the monotonic clock: by the wall clock alone a step back of an hour would stop all ticks for one."""

from datetime import datetime
from time import monotonic

from celery.beat import Scheduler
from celery.schedules import schedstate, schedule


class Every(schedule):
    """Due every so many seconds of the monotonic clock."""

    def __init__(self, every_s: float) -> None:
        super().__init__(every_s)
        self._due_at = monotonic()

    def is_due(self, last_run_at: datetime) -> schedstate:
        now = monotonic()
        if now < self._due_at:
            return schedstate(False, self._due_at - now)
        self._due_at = max(self._due_at + self.seconds, now)
        return schedstate(True, self._due_at - now)


class SteadyScheduler(Scheduler):
    """Makes its queue of entries, which holds times of the wall clock, anew once that has been set back."""

    _last_now: datetime | None = None

    def tick(self) -> float:
        now = self.app.now()
        if self._last_now is not None and now < self._last_now:
            self._heap = None
        self._last_now = now
        wait: float = super().tick()
        return wait
