"""The weights of an engine itself, where a policy trains all of them: whose they are, and others in their place."""

import structlog

from app.db.models import PolicyVersion, Replica
from app.db.repositories import deployments, swaps
from app.db.repositories.events import add_event
from app.db.session import Database
from app.engine.control_client import ControlClient
from app.engine.errors import EngineError, EngineOverloaded, EngineSlow, WeightsRejected
from app.policies.canary import Verdict
from app.policies.ownership import Ownership
from app.policies.plan import Step
from app.policies.readings import Readings
from app.policies.standstill import Standstill
from app.policies.swap import swap_weights

log = structlog.get_logger()


class OwnWeights:
    """In one pass over one replica; the arguments are the pass's."""

    def __init__(
        self,
        database: Database,
        probe: ControlClient,
        work: ControlClient,
        replica: Replica,
        ownership: Ownership,
        readings: Readings,
        standstill: Standstill,
    ):
        self._database = database
        self._probe = probe
        self._work = work
        self._replica = replica
        self._url = replica.url
        self._ownership = ownership
        self._readings = readings
        self._standstill = standstill
        self.label: str | None = None
        """Whose they are, as a label says it that can be believed."""

    def look(self) -> None:
        """Read the label. It stays None on an engine that is paused, by a process that died over it, since nobody
        knows what it has: then the live version is loaded anew, which resumes it. Raises EngineError."""
        try:
            if self._probe.is_paused(self._url):
                self._standstill.begins()
                return
            self._standstill.ends()
            self.label = self._probe.weight_label(self._url)
        except WeightsRejected as error:  # it cannot: the next step meets that too, and says so
            log.warning("weights_unknown", replica=self._url, error=error.message)

    def read_before(self, step: Step) -> None:
        """The reference's readings, while the engine still has its weights. An engine that is busy keeps them unread,
        and the version unchecked."""
        reference = step.reference
        if not step.probes or reference is None or self.label != reference.adapter_name:
            return
        try:
            self._readings.take(self._work, reference.adapter_name, step)
        except (EngineOverloaded, EngineSlow) as error:
            log.warning("reference_not_read", replica=self._url, adapter=reference.adapter_name, error=error.message)

    def swap(self, version: PolicyVersion) -> None:
        """Raises what `swap_weights` raises."""
        self.label = None
        swap_weights(self._work, self._url, version, self._ownership.take, self._standstill)
        self.label = version.adapter_name
        self._readings.drop(version.adapter_name)

    def put_back(self, version: PolicyVersion, failed: PolicyVersion) -> None:
        """What was served before `failed`. Unchecked: the engine may be too busy for it, and has had them before."""
        try:
            self.swap(version)
        except EngineError as error:
            log.error("weights_not_put_back", replica=self._url, adapter=version.adapter_name, error=error.message)
            message = (
                f"version {version.number} could not be put back on {self._url}, which serves nothing until it is: "
                f"{error.message}"
            )
            with self._database.write() as session:
                add_event(session, "weights_not_put_back", message, policy_id=version.policy_id)
            return
        with self._database.write() as session:
            deployments.finish_deployment(
                session,
                self._replica.id,
                version.id,
                verdict=Verdict.UNCHECKED,
                score=None,
                distance=None,
                noise=None,
                paused_ms=self._standstill.take_ms(),
            )
            swaps.note_undone(session, self._replica.id, failed.id, version.id)
        log.info("weights_put_back", replica=self._url, adapter=version.adapter_name)
