"""The Celery application: two queues, and beat's ticks.

A message is only a wake-up. Work lives in the database: a tick asks it what is due, so a lost or doubled message
changes nothing. Hence early acks, no retries (the next tick is the retry), no results, and messages that expire.
`control` holds no torch; learner/tasks.py registers `learner.learn_tick` here and runs on the `learn` queue.
"""

import logging
import sys
from typing import Any, Literal

from celery import Celery
from celery.signals import after_setup_logger
from kombu.entity import Exchange, Queue

from app.beat import Every
from app.settings import Settings, get_settings

QueueName = Literal["learn", "control"]
QUEUES: tuple[QueueName, ...] = ("learn", "control")

LEARN_TICK = "learner.learn_tick"
PRETRAIN_VALUE = "learner.pretrain_value"
"""On request, not by beat: (policy name, epochs)."""
DEPLOY_TICK = "control.deploy_tick"
SWEEP_TICK = "control.sweep_tick"
RETENTION_TICK = "control.retention_tick"


def _tick(task: str, queue: QueueName, every_s: float) -> dict[str, Any]:
    # a tick that waited as long as its period is worthless: the next one is there
    return {"task": task, "schedule": Every(every_s), "options": {"queue": queue, "expires": every_s}}


def _broker(settings: Settings) -> dict[str, Any]:
    """Celery settings of the broker: the filesystem by default, Redis or RabbitMQ by BROKER_URL."""
    if settings.broker_url != "filesystem://":
        return {"broker_url": settings.broker_url}
    messages = settings.broker_dir / "queues"
    messages.mkdir(parents=True, exist_ok=True)
    return {
        "broker_url": settings.broker_url,
        "broker_transport": "app.broker.filesystem:Transport",
        "broker_transport_options": {
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "control_folder": str(settings.broker_dir / "exchanges"),
            "polling_interval": 0.1,
        },
    }


def create_celery_app(settings: Settings) -> Celery:
    app = Celery("evergreen", include=["app.policies.tasks"])
    app.conf.update(
        **_broker(settings),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_heartbeat=0,  # a solo worker does not answer heartbeats while it trains
        task_queues=[Queue(name, Exchange(name, type="direct"), routing_key=name) for name in QUEUES],
        task_default_queue="control",
        task_default_delivery_mode="transient",
        task_ignore_result=True,
        task_acks_late=False,
        worker_pool="solo",
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_redirect_stdouts=False,
        beat_scheduler="app.beat:SteadyScheduler",  # in memory: ticks of a minute at most need no schedule file
        beat_schedule={
            "learn": _tick(LEARN_TICK, "learn", 1.0),
            "deploy": _tick(DEPLOY_TICK, "control", 1.0),
            "sweep": _tick(SWEEP_TICK, "control", 5.0),
            "retention": _tick(RETENTION_TICK, "control", 60.0),
        },
    )
    return app


def worker_command(queue: QueueName) -> list[str]:
    """The command line of one worker process. It purges its queue at start: old wake-ups are worth nothing."""
    module = "learner.tasks" if queue == "learn" else "app.celery_app"
    flags = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--purge", "--loglevel", "INFO"]
    return [sys.executable, "-m", "celery", "-A", module, "worker", "-Q", queue, "-n", f"{queue}@%h",
            "--pool", "solo", "--concurrency", "1", *flags]  # fmt: skip


def beat_command() -> list[str]:
    """The command line of beat: a process of its own, since `worker -B` leaves an orphan when the worker is killed."""
    return [sys.executable, "-m", "celery", "-A", "app.celery_app", "beat", "--pidfile", "", "--loglevel", "WARNING"]


@after_setup_logger.connect
def _quiet(**_: Any) -> None:
    """A line or two for every tick and every look at an engine would bury what matters."""
    for name in ("celery.worker.strategy", "celery.worker.request", "celery.app.trace", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


celery_app = create_celery_app(get_settings())
