"""Deployment as reconciliation: the database says what should be loaded where; a tick makes every replica match.

Done by `control` alone. Replicas are worked on side by side, each by one process at a time (its row says whose), so a
dead or slow one holds up no other. A version goes live when it is verified on every healthy replica of its base model.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from uuid import UUID, uuid4

import structlog

from app.db.models import Replica
from app.db.repositories import deployments, replicas, swaps
from app.db.repositories.events import add_event
from app.db.repositories.policies import list_policies
from app.db.repositories.replicas import is_unserved
from app.db.session import Database
from app.engine.control_client import ControlClient
from app.policies.readings import Readings
from app.policies.reconcile import ReplicaPass
from app.policies.standstill import Standstill

PROBE_TIMEOUT_S = 5.0
WORK_TIMEOUT_S = 60.0
RELOAD_TIMEOUT_S = 1800.0
"""For a reload of whole weights. It cannot be called off, and only its answer tells what the engine has: to give up
while it runs keeps the engine paused for longer. 140 GB (70 billion parameters) take 24 min from a disk of 100 MB/s."""
MAX_REPLICAS_AT_ONCE = 16

log = structlog.get_logger()


class Deployer:
    """One per control process.

    Args:
        urls: the engine replicas that should be served.
    """

    def __init__(self, database: Database, urls: Sequence[str]):
        self._database = database
        self._urls = urls
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._probe = ControlClient(PROBE_TIMEOUT_S)
        self._work = ControlClient(WORK_TIMEOUT_S, RELOAD_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(MAX_REPLICAS_AT_ONCE, thread_name_prefix="replica")
        self._running: dict[UUID, Future[None]] = {}
        self._readings: dict[UUID, Readings] = {}
        self._standstills: dict[UUID, Standstill] = {}
        self._told: dict[str, frozenset[UUID]] = {}
        """Event -> what it was said of at the last tick, and still holds."""

    def tick(self, wait_s: float = 2.0) -> None:
        """Begin a pass over every replica that has none, wait for them up to `wait_s`, and promote what is ready.

        A pass that takes longer goes on in its thread. What a pass raised is raised here.
        """
        for replica in self._replicas():
            if replica.id not in self._running:
                readings = self._readings.setdefault(replica.id, Readings(replica.url))
                stood = self._standstills.setdefault(replica.id, Standstill())
                one = ReplicaPass(self._database, self._probe, self._work, replica, self._owner, readings, stood)
                self._running[replica.id] = self._pool.submit(one.run)
        ended, _ = wait(self._running.values(), timeout=wait_s)
        self._running = {key: future for key, future in self._running.items() if future not in ended}
        self._promote()
        self._tell_overdue()
        self._tell_unserved()
        self._tell_crowded()
        for future in ended:
            future.result()

    def close(self) -> None:
        """Wait for the passes that run."""
        self._pool.shutdown()
        self._probe.close()
        self._work.close()

    def _replicas(self) -> list[Replica]:
        with self._database.read() as session:
            active = replicas.active_replicas(session)
        if {replica.url for replica in active} == set(self._urls):
            return active
        with self._database.write() as session:
            replicas.sync_replicas(session, self._urls)
        with self._database.read() as session:
            return replicas.active_replicas(session)

    def _promote(self) -> None:
        with self._database.read() as session:
            ready = deployments.policies_to_promote(session)
        for policy_id in ready:
            with self._database.write() as session:
                deployments.go_live(session, policy_id)

    def _tell_overdue(self) -> None:
        """Also of a swap whose pass is still waiting for the engine."""
        with self._database.read() as session:
            overdue = swaps.overdue_swaps(session)
        messages = {
            replica.id: f"{replica.url} has been closed for a swap of weights since {replica.swap_began_at:%H:%M:%S} "
            "UTC: new requests are answered 429 where no other engine serves, and what runs there may stand still. A "
            "reload is waited for while it runs; an engine that hangs must be restarted. /admin/replicas says more."
            for replica in overdue
        }
        self._tell_once("swap_overdue", messages, of_policies=False)

    def _tell_unserved(self) -> None:
        """A policy on whose base model no engine runs waits until somebody starts one."""
        with self._database.read() as session:
            unserved = [policy for policy in list_policies(session) if is_unserved(session, policy.base_model)]
        messages = {
            policy.id: f"No engine serves the base model of the policy {policy.name}, {policy.base_model}: start one "
            "on it, and add its URL to EVERGREEN_ENGINE_URLS. /admin/replicas shows what each engine serves."
            for policy in unserved
        }
        self._tell_once("base_model_not_served", messages)

    def _tell_crowded(self) -> None:
        """Such a policy is not deployed. Creating one is refused; here, it came another way."""
        with self._database.read() as session:
            crowded = deployments.crowded_policies(session)
        messages = {
            policy.id: f"The policy {policy.name} trains all weights of {policy.base_model}, which other policies use "
            "too: an engine has one set of weights, so it is not deployed. Give it a copy of the model in another "
            "directory, and an engine of its own that is started on it."
            for policy in crowded
        }
        self._tell_once("full_policy_not_alone", messages)

    def _tell_once(self, event: str, messages: Mapping[UUID, str], *, of_policies: bool = True) -> None:
        """Log and note what was not so at the last tick. messages: policy (or replica) -> what to say of it."""
        for key in messages.keys() - self._told.get(event, frozenset()):
            log.error(event, message=messages[key])
            with self._database.write() as session:
                add_event(session, event, messages[key], policy_id=key if of_policies else None)
        self._told[event] = frozenset(messages)
