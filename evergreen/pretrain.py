"""`evergreen pretrain-value`: the critic of a policy learns from the rollouts that have been logged."""

from collections.abc import Callable
from time import monotonic, sleep

import torch

from app.celery_app import PRETRAIN_VALUE, create_celery_app
from app.db.models import Update
from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.rollouts.learning import Idle
from app.rollouts.states import UpdateState
from app.settings import Settings
from learner.pretraining import in_words
from learner.worker import LearnWorker

LEASE_WAIT_S = 300.0
"""How long a running update is waited for."""


def send_pretraining(settings: Settings, policy: str, epochs: int) -> None:
    """Ask the learn worker that runs to do it; /admin/events will say what came of it.

    Raises:
        NotFound: there is no such policy.
    """
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    try:
        with database.read() as session:
            get_policy(session, policy)
    finally:
        database.close()
    create_celery_app(settings).send_task(PRETRAIN_VALUE, (policy, epochs), queue="learn")


def pretrain(settings: Settings, policy: str, epochs: int, say: Callable[[str], None]) -> bool:
    """Do it in this process. Returns whether the critic was trained; `say` is told how it went.

    Raises:
        NotFound: there is no such policy.
    """
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    try:
        database.upgrade()
        with database.read() as session:
            policy_id = get_policy(session, policy).id
        torch.set_flush_denormal(True)  # as the learn worker does
        worker = LearnWorker(settings, database)
        deadline = monotonic() + LEASE_WAIT_S
        outcome = worker.pretrain(policy_id, epochs)
        while isinstance(outcome, Idle) and outcome.reason.startswith("update_running") and monotonic() < deadline:
            sleep(0.5)  # the lease is a row in the database: there is nothing else to wait on
            outcome = worker.pretrain(policy_id, epochs)
        if isinstance(outcome, Idle):
            say(f"The critic of {policy} was not trained: {outcome.reason}")
            return False
        with database.read() as session:
            update = session.get_one(Update, outcome)
        if update.state != UpdateState.DONE or update.health is None:
            say(f"The critic of {policy} was not trained: {update.error or f'update {update.id} was lost'}")
            return False
        say(in_words(policy, update.health))
        return True
    finally:
        database.close()
