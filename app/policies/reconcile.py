"""One pass over one replica: make what it has loaded match the plan. No transaction is open while HTTP runs."""

from enum import Enum, auto
from time import monotonic

import structlog

from app.db.models import PolicyVersion, Replica
from app.db.repositories import deployments, replicas, swaps
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
from app.policies.canary import Comparison, Verdict, compare, judge, rejects, with_sample
from app.policies.own_weights import OwnWeights
from app.policies.ownership import Ownership
from app.policies.plan import Plan, Step, make_plan
from app.policies.readings import Readings
from app.policies.standstill import Standstill
from app.policies.swap import TurnLost, check_label
from app.rollouts.states import VersionStatus

SWAP_RETRY_S = 30.0
"""A swap that was undone because the engine was busy closes the replica again not before so long."""
BACKOFF_S = (5.0, 30.0, 0.0)
"""Three tries: so long after each failed one; after the last the candidate is rejected."""
SILENCE_S = 15.0
"""An engine that accepts connections but answers late stays healthy this long."""
PASS_S = 5.0
"""No new step begins after this long; the next tick goes on."""

log = structlog.get_logger()


class Outcome(Enum):
    """Of one version on one engine."""

    SERVED = auto()
    FAILED = auto()
    POSTPONED = auto()
    LOST = auto()
    """The engine is gone."""


class ReplicaPass:
    """Args:
    probe: a client with a short timeout, for health and what is loaded.
    work: one with a longer timeout, for loads and the canary.
    owner: this process; the replica's row is owned while the pass runs.
    readings: what the canary has read there, kept between passes.
    standstill: for how long it has been paused, kept between passes.
    """

    def __init__(
        self,
        database: Database,
        probe: ControlClient,
        work: ControlClient,
        replica: Replica,
        owner: str,
        readings: Readings,
        standstill: Standstill,
    ):
        self._database = database
        self._probe = probe
        self._work = work
        self._replica = replica
        self._url = replica.url
        self._ownership = Ownership(database, replica, owner)
        self._base_model: str | None = None
        self._loaded: set[str] = set()
        """Adapters."""
        self._readings = readings
        self._standstill = standstill
        self._own_weights = OwnWeights(database, probe, work, replica, self._ownership, readings, standstill)

    def run(self) -> None:
        if not self._ownership.take():
            return
        with self._ownership.kept():
            try:
                if self._look():
                    self._converge()
            except TurnLost as lost:
                log.warning("turn_lost", replica=self._url, error=str(lost))

    def _look(self) -> bool:
        """Whether it answers; notes what it serves."""
        try:
            served = self._probe.models(self._url)
            self._base_model = next((model.root for model in served if model.parent is None), None)
            trains_weights = self._trains_weights()
            if trains_weights:
                self._own_weights.look()
        except EngineError as error:
            grace_s = 0.0 if isinstance(error, EngineUnreachable) else SILENCE_S
            with self._database.write() as session:
                replicas.note_unreachable(session, self._replica.id, error.message, grace_s=grace_s)
            return False
        self._loaded = {model.id for model in served if model.parent is not None}
        with self._database.write() as session:
            replicas.note_reachable(session, self._replica.id, self._base_model, self._loaded, self._own_weights.label)
        self._readings.keep(self._loaded, whole_models=trains_weights)
        return True

    def _trains_weights(self) -> bool:
        """Whether a policy trains the engine's own."""
        with self._database.read() as session:
            return any(policy.own_weights for policy in deployments.wanted(session, self._base_model))

    def _converge(self) -> None:
        until = monotonic() + PASS_S
        while True:
            plan = self._plan()
            self._unload(plan)
            if plan.step is None or monotonic() > until or not self._ownership.take() or not self._take(plan.step):
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
        """Load and check one version. False: the engine cannot be worked with now.

        Own weights: those that were served are put back if the new ones fail. An engine that is lost in the middle is
        found closed, and perhaps paused, by the next look at it; then its live version is loaded.
        """
        served = None
        try:
            if step.own_weights:
                self._own_weights.read_before(step)
            with self._database.write() as session:
                if step.own_weights:
                    if swaps.another_is_closed(session, self._replica.id, step.version.policy_id):
                        return False
                    served = swaps.close_for_swap(session, self._replica.id)
                deployments.start_deployment(session, self._replica.id, step.version.id)
            outcome = self._try(step)
        except EngineUnreachable as error:  # the next look at it says so
            log.warning("engine_lost", replica=self._url, adapter=step.version.adapter_name, error=error.message)
            return False
        if outcome is not Outcome.SERVED and outcome is not Outcome.LOST and served is not None:
            self._own_weights.put_back(served, step.version)
        return outcome in (Outcome.SERVED, Outcome.FAILED)

    def _try(self, step: Step) -> Outcome:
        version = step.version
        try:
            if step.own_weights:
                self._own_weights.swap(version)
            elif version.adapter_name not in self._loaded:
                self._load(version)
            comparison = self._check(step)
        except EngineUnreachable:
            raise
        except (EngineOverloaded, EngineSlow) as error:
            self._postpone(step, error.message)
            return Outcome.POSTPONED
        except EngineError as error:
            if not self._probe.health(self._url):
                return Outcome.LOST  # it died under our hands: that says nothing about the version
            self._fail(version, error.message, None)
            return Outcome.FAILED
        return self._judge(step, comparison)

    def _load(self, version: PolicyVersion) -> None:
        try:
            self._work.load_adapter(self._url, version.adapter_name, version.path)
        except AdapterRejected:
            # another control process may have been first; names are never used twice, so it is the same adapter
            if version.adapter_name not in {model.id for model in self._probe.models(self._url)}:
                raise
            log.info("adapter_was_loaded", replica=self._url, adapter=version.adapter_name)
        self._loaded.add(version.adapter_name)

    def _check(self, step: Step) -> Comparison | None:
        """None: there is nothing to compare with; or the live version's own weights are in an engine that is too busy
        to say what it makes of them. To load them again would stop it again, and keep its requests out."""
        try:
            if step.own_weights:
                check_label(self._work, self._url, step.version)
            return self._compare(step)
        except (EngineOverloaded, EngineSlow) as error:
            if not step.own_weights or step.version.status != VersionStatus.LIVE:
                raise
            log.warning("live_weights_unchecked", replica=self._url, adapter=step.version.adapter_name,
                        error=error.message)  # fmt: skip
            return None

    def _compare(self, step: Step) -> Comparison | None:
        """None: there is nothing to compare with."""
        if step.reference is None or not step.probes or not step.version.probe or not step.reference.probe:
            return None
        if step.own_weights and self._readings.known(step.reference.adapter_name) is None:
            return None
        return compare(
            self._readings.take(self._work, step.version.adapter_name, step),
            self._readings.take(self._work, step.reference.adapter_name, step),
            [dict(position) for position in step.version.probe],
            [dict(position) for position in step.reference.probe],
        )

    def _judge(self, step: Step, comparison: Comparison | None) -> Outcome:
        version = step.version
        noise = list(self._replica.noise)
        verdict = Verdict.UNCHECKED if comparison is None else judge(comparison, noise)
        if comparison is not None and rejects(verdict, noise):
            self._fail(version, comparison.in_words(), comparison)
            return Outcome.FAILED
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
                paused_ms=self._standstill.take_ms() if step.own_weights else None,
            )
            if comparison is not None and verdict is Verdict.FAILED:
                add_event(
                    session,
                    "canary_alarm",
                    f"version {version.number} on {self._url}: {comparison.in_words()}; served all the same: "
                    f"first steps are often too small to tell, and the noise of only {len(noise)} versions is known",
                    policy_id=version.policy_id,
                )
            deployments.go_live(session, version.policy_id)
        log.info("version_deployed", replica=self._url, adapter=version.adapter_name, verdict=verdict,
                 score=comparison and comparison.score)  # fmt: skip
        return Outcome.SERVED

    def _postpone(self, step: Step, error: str) -> None:
        """A busy engine says nothing about the version: no try is counted. In words that stay the same meanwhile."""
        version = step.version
        log.warning("deployment_postponed", replica=self._url, adapter=version.adapter_name, error=error)
        with self._database.write() as session:
            deployments.postpone_deployment(
                session,
                self._replica.id,
                version,
                f"{self._url} is too busy to load and check it; it is tried again until the engine answers in time",
                retry_s=SWAP_RETRY_S if step.own_weights else None,
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
        self._readings.drop(version.adapter_name)
        if version.adapter_name in self._loaded:
            self._drop(version.adapter_name)
