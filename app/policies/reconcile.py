"""One pass over one replica: make what it has loaded match the plan. No transaction is open while HTTP runs."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.db.models import PolicyVersion, Replica
from app.db.repositories import deployments, replicas
from app.db.repositories.events import add_event
from app.db.session import Database
from app.db.types import clock
from app.engine.control_client import ControlClient
from app.engine.errors import (
    AdapterNotLoaded,
    AdapterRejected,
    EngineError,
    EngineOverloaded,
    EngineSlow,
    EngineUnreachable,
)
from app.policies.canary import Comparison, Reading, Verdict, compare, judge, rejects, with_sample
from app.policies.plan import Plan, Step, make_plan

BACKOFF_S = (5.0, 30.0, 0.0)
"""Three tries: so long after each failed one; after the last the candidate is rejected."""
SILENCE_S = 15.0
"""An engine that accepts connections but answers late stays healthy this long."""
PASS_S = 5.0
"""No new step begins after this long; the next tick goes on."""
OWNED_S = 20.0
"""Renewed while the pass runs."""

log = structlog.get_logger()


class ReplicaPass:
    """Args:
    probe: a client with a short timeout, for health and what is loaded.
    work: one with a longer timeout, for loads and the canary.
    owner: this process; the replica's row is owned while the pass runs.
    readings: what the canary has read of adapters that are loaded there, kept between passes.
    """

    def __init__(
        self,
        database: Database,
        probe: ControlClient,
        work: ControlClient,
        replica: Replica,
        owner: str,
        readings: dict[str, list[Reading]],
    ):
        self._database = database
        self._probe = probe
        self._work = work
        self._replica = replica
        self._url = replica.url
        self._owner = owner
        self._base_model: str | None = None
        self._loaded: set[str] = set()
        self._readings = readings

    def run(self) -> None:
        if not self._own():
            return
        try:
            with self._owning():
                if self._look():
                    self._converge()
        finally:
            with self._database.write() as session:
                replicas.release_replica(session, self._replica.id, self._owner)

    def _own(self) -> bool:
        with self._database.write() as session:
            return replicas.take_replica(session, self._replica.id, self._owner, OWNED_S)

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """One call may take longer than an ownership lasts, which is short so that a killed process blocks nobody."""
        ended = Event()

        def renew() -> None:
            while not ended.wait(OWNED_S / 4):
                try:
                    self._own()
                except SQLAlchemyError as error:
                    log.warning("replica_not_renewed", replica=self._url, error=str(error))

        keeper = Thread(target=renew, name="replica-owner", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()

    def _look(self) -> bool:
        """Whether it answers; notes what it serves."""
        try:
            served = self._probe.models(self._url)
        except EngineError as error:
            grace_s = 0.0 if isinstance(error, EngineUnreachable) else SILENCE_S
            with self._database.write() as session:
                replicas.note_unreachable(session, self._replica.id, error.message, grace_s=grace_s)
            return False
        self._base_model = next((model.root for model in served if model.parent is None), None)
        self._loaded = {model.id for model in served if model.parent is not None}
        for name in self._readings.keys() - self._loaded:
            del self._readings[name]
        with self._database.write() as session:
            replicas.note_reachable(session, self._replica.id, self._base_model, self._loaded)
        return True

    def _converge(self) -> None:
        until = monotonic() + PASS_S
        while True:
            plan = self._plan()
            self._unload(plan)
            if plan.step is None or monotonic() > until or not self._own() or not self._take(plan.step):
                return

    def _plan(self) -> Plan:
        with self._database.read() as session:
            deployed = deployments.deployments_on(session, self._replica.id)
            return make_plan(deployments.wanted(session, self._base_model), deployed, clock(session))

    def _unload(self, plan: Plan) -> None:
        with self._database.read() as session:
            surplus = deployments.known_adapters(session, self._loaded - plan.keep)
        if not surplus:
            return
        with self._database.write() as session:
            deployments.unload_deployments(session, self._replica.id, surplus)
        for name in sorted(surplus):
            self._drop(name)

    def _drop(self, name: str) -> None:
        try:
            self._work.unload_adapter(self._url, name)
        except AdapterNotLoaded:
            log.info("adapter_was_gone", replica=self._url, adapter=name)
        except EngineError as error:
            log.warning("unload_failed", replica=self._url, adapter=name, error=error.message)
            return
        self._loaded.discard(name)

    def _take(self, step: Step) -> bool:
        """Load and check one version. False: the engine cannot be worked with now."""
        version = step.version
        with self._database.write() as session:
            deployments.start_deployment(session, self._replica.id, version.id)
        try:
            if version.adapter_name not in self._loaded:
                self._load(version)
            comparison = self._compare(step)
        except EngineUnreachable as error:  # the next look at it says so
            log.warning("engine_lost", replica=self._url, adapter=version.adapter_name, error=error.message)
            return False
        except (EngineOverloaded, EngineSlow) as error:
            self._postpone(version, error.message)
            return False
        except EngineError as error:
            if not self._probe.health(self._url):
                return False  # it died under our hands: that says nothing about the version
            self._fail(version, error.message, None)
            return True
        self._judge(version, comparison)
        return True

    def _load(self, version: PolicyVersion) -> None:
        try:
            self._work.load_adapter(self._url, version.adapter_name, version.path)
        except AdapterRejected:
            # another control process may have been first; names are never used twice, so it is the same adapter
            if version.adapter_name not in {model.id for model in self._probe.models(self._url)}:
                raise
            log.info("adapter_was_loaded", replica=self._url, adapter=version.adapter_name)
        self._loaded.add(version.adapter_name)

    def _compare(self, step: Step) -> Comparison | None:
        """None: there is nothing to compare with."""
        if step.reference is None or not step.probes or not step.version.probe or not step.reference.probe:
            return None
        return compare(
            self._read(step.version.adapter_name, step.probes),
            self._read(step.reference.adapter_name, step.probes),
            [dict(position) for position in step.version.probe],
            [dict(position) for position in step.reference.probe],
        )

    def _read(self, adapter: str, probes: Sequence[Sequence[int]]) -> list[Reading]:
        """Once per load. The first alone, so that the others find their shared prefix computed, in one batch."""
        if adapter not in self._readings:
            first, *others = ((self._url, adapter, prompt) for prompt in probes)
            reading: list[Reading] = [self._work.top_logprobs(*first)]
            with ThreadPoolExecutor(len(probes)) as pool:
                reading += pool.map(lambda asked: self._work.top_logprobs(*asked), others)
            self._readings[adapter] = reading
        return self._readings[adapter]

    def _judge(self, version: PolicyVersion, comparison: Comparison | None) -> None:
        noise = list(self._replica.noise)
        verdict = Verdict.UNCHECKED if comparison is None else judge(comparison, noise)
        if comparison is not None and rejects(verdict, noise):
            self._fail(version, _in_words(comparison), comparison)
            return
        if comparison is not None:
            self._replica.noise = with_sample(noise, comparison, verdict)
        with self._database.write() as session:
            deployments.finish_deployment(
                session,
                self._replica.id,
                version.id,
                verdict=verdict,
                score=comparison.score if comparison else None,
                distance=comparison.distance if comparison else None,
                noise=self._replica.noise,
            )
            if comparison is not None and verdict is Verdict.FAILED:
                add_event(
                    session,
                    "canary_alarm",
                    f"version {version.number} on {self._url}: {_in_words(comparison)}; served all the same, since the "
                    f"noise of only {len(noise)} versions has been measured",
                    policy_id=version.policy_id,
                )
            deployments.go_live(session, version.policy_id)
        log.info("version_deployed", replica=self._url, adapter=version.adapter_name, verdict=verdict,
                 score=comparison and comparison.score)  # fmt: skip

    def _postpone(self, version: PolicyVersion, error: str) -> None:
        """A busy engine says nothing about the version: no try is counted. In words that stay the same meanwhile."""
        log.warning("deployment_postponed", replica=self._url, adapter=version.adapter_name, error=error)
        with self._database.write() as session:
            deployments.postpone_deployment(
                session,
                self._replica.id,
                version,
                f"{self._url} is too busy to load and check it; it is tried again until the engine answers in time",
            )

    def _fail(self, version: PolicyVersion, error: str, comparison: Comparison | None) -> None:
        log.error("deployment_failed", replica=self._url, adapter=version.adapter_name, error=error)
        with self._database.write() as session:
            deployments.fail_deployment(
                session,
                self._replica.id,
                version,
                error,
                verdict=Verdict.FAILED if comparison else None,
                score=comparison.score if comparison else None,
                distance=comparison.distance if comparison else None,
                backoff_s=BACKOFF_S,
            )
        self._readings.pop(version.adapter_name, None)
        if version.adapter_name in self._loaded:
            self._drop(version.adapter_name)


def _in_words(comparison: Comparison) -> str:
    return (
        f"the canary's score is {comparison.score or 0.0:.2f} (1 = the version is served, 0 = the reference still is) "
        f"at a distance of {comparison.distance:.3f} nats over {comparison.tokens} tokens"
    )
