"""The learn worker's Celery side: `celery -A learner.tasks worker -Q learn --pool solo --concurrency 1`."""

import os
from functools import cache
from typing import Any

import torch
from celery.signals import worker_init, worker_shutting_down

from app.celery_app import LEARN_TICK, PRETRAIN_VALUE, celery_app
from app.db.repositories.events import add_event
from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.rollouts.learning import Idle
from app.settings import get_settings
from learner.worker import LearnWorker

__all__ = ["celery_app", "learn_tick", "pretrain_value"]

NICENESS = 10
"""The learner yields to whoever waits for an answer. So it may use every core (torch's default; OMP_NUM_THREADS sets
another number): an update on 32 tickets takes 23 s of CPU time with one thread and 24 s with two."""


@celery_app.task(name=LEARN_TICK)
def learn_tick() -> None:
    """A wake-up: do whatever the database says is due."""
    learn_worker().tick()


@celery_app.task(name=PRETRAIN_VALUE)
def pretrain_value(policy: str, epochs: int) -> None:
    """An operator's request; an event says what came of it. If the message is lost, it must be asked for again."""
    worker = learn_worker()
    with worker.database.read() as session:
        policy_id = get_policy(session, policy).id
    outcome = worker.pretrain(policy_id, epochs)
    if isinstance(outcome, Idle):
        with worker.database.write() as session:
            add_event(session, "value_not_pretrained", outcome.reason, policy_id=policy_id)


@cache
def learn_worker() -> LearnWorker:
    """This process's worker; it holds the model between ticks."""
    settings = get_settings()
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    database.upgrade()
    return LearnWorker(settings, database)


@worker_init.connect
def _start(**_: Any) -> None:
    os.nice(max(0, NICENESS - os.nice(0)))
    # far below every rounding error, but a CPU takes ten times as long over them: attention weights have many
    torch.set_flush_denormal(True)
    learn_worker()


@worker_shutting_down.connect
def _stop(**_: Any) -> None:
    learn_worker().stop()
