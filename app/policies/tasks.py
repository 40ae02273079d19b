"""Control's ticks. Each asks the database what is due; a lost or doubled one changes nothing."""

from functools import lru_cache

from app.broker.backlog import trim_backlog
from app.celery_app import DEPLOY_TICK, RETENTION_TICK, SWEEP_TICK, celery_app
from app.db.session import Database
from app.policies.deploy import Deployer
from app.policies.retention import Retention
from app.rollouts.leases import expire_leases
from app.rollouts.sweeps import sweep_idle, sweep_orphans, sweep_stale
from app.settings import get_settings


@lru_cache
def _database() -> Database:
    settings = get_settings()
    return Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)


@lru_cache
def _deployer() -> Deployer:
    return Deployer(_database(), get_settings().replica_urls)


@lru_cache
def _retention() -> Retention:
    settings = get_settings()
    return Retention(_database(), settings.artifacts_dir, settings.bodies_kept_days)


@celery_app.task(name=DEPLOY_TICK)
def deploy_tick() -> None:
    _deployer().tick()


@celery_app.task(name=SWEEP_TICK)
def sweep_tick() -> None:
    settings = get_settings()
    with _database().write() as session:
        expire_leases(session)
    with _database().write() as session:
        sweep_orphans(session, settings.request_timeout_s)
    with _database().write() as session:
        sweep_idle(session, settings.idle_with_reward_s, settings.idle_without_reward_s)
    with _database().write() as session:
        sweep_stale(session)


@celery_app.task(name=RETENTION_TICK)
def retention_tick() -> None:
    _retention().tick()
    trim_backlog(celery_app)
