"""One learn worker: it asks the database what is due, trains it, writes the files, and commits.

The database decides; memory is a cache. The learner's state leaves memory when an update begins and comes back only
after the commit, so whatever goes wrong in between, the next claim reads it again from the head's checkpoint.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import structlog
from safetensors import SafetensorError
from sqlalchemy.orm import Session

from app.db.models import Policy, Update
from app.db.repositories.events import add_event
from app.db.repositories.policies import list_policies
from app.db.repositories.retention import version_directories
from app.db.repositories.versions import add_version_zero
from app.db.session import Database
from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings, as_training
from app.rollouts.claimed import Claim
from app.rollouts.learning import Idle, LeaseLost, claim_update, commit_update, fail_update, note_idle, renew_lease
from app.rollouts.pretraining import claim_pretraining, has_history, with_history
from app.rollouts.states import UpdateState
from app.settings import Settings
from learner.lease import LEASE_TTL_S, LeaseKeeper
from learner.prepare import write_version_zero
from learner.pretraining import in_words, pretrain_value
from learner.state import LearnerState, load_state
from learner.update import Trained, train, update_done
from learner.update_files import remove_files, sweep_files, write_checkpoint, write_version

log = structlog.get_logger()

STEP_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What training on some rollout's data can raise: torch reports its errors as RuntimeError, an id outside the
vocabulary as IndexError; a refused sample is a ValueError. The update fails, its rollouts are tried again in halves."""
MACHINE_ERRORS = (
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""What reading the learner's state (with settings that torch does not take, too) or writing files can raise. No rollout
is to blame: all go back as they were."""
REST_S = 30.0
"""Pause of a policy after such an error: a full disk is not tried again every second."""

FINISHES_WITHIN_S = 15.0
"""After a stop. `evergreen up`, and docker by a setting of its own, kill a learner that has not ended after 30 s."""

Train = Callable[[Claim, LearnerState], Trained]


class LearnWorker:
    """One per process. `tick` runs in one thread; `stop` may be called from a signal handler."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._settings = settings
        self._artifacts = settings.artifacts_dir
        self.database = database
        self._stopping_since: float | None = None
        self._state: LearnerState | None = None
        self._resting_until: dict[UUID, float] = {}
        self._turn = UUID(int=0)
        """The policy whose turn was last."""

    def stop(self) -> None:
        """Claim no further update. The one under way is finished if that takes no longer than FINISHES_WITHIN_S; if it
        does, its rollouts are given back as they were, before whoever stops this process kills it."""
        self._stopping_since = time.monotonic()

    def tick(self) -> None:
        """Every policy once: version 0 where it is missing, then one update where one is due.

        Raises:
            SQLAlchemyError: the database cannot be reached; the next tick tries again.
        """
        with self.database.read() as session:
            policies = list_policies(session)
        # whatever one policy's turn raises ends the tick; the next one begins behind it, so that it starves no other
        behind = sum(policy.id <= self._turn for policy in policies)
        for policy in policies[behind:] + policies[:behind]:
            self._turn = policy.id
            if self._stopping_since is not None:
                return
            if time.monotonic() < self._resting_until.get(policy.id, 0.0):
                continue
            if policy.head is not None or self._prepare(policy):
                self._learn(policy.id)

    def _prepare(self, policy: Policy) -> bool:
        """Whether version 0 is there now."""
        try:
            settings = LearningSettings.model_validate(policy.settings)
            base_model = Path(policy.base_model)
            dtype = resolve_dtype(self._settings.dtype, base_model)
            written = write_version_zero(
                policy.name, policy.id, base_model, settings, self._artifacts, as_training(policy.training), dtype
            )
        except MACHINE_ERRORS as error:
            message = f"Version 0 of {policy.name} could not be written: {error}"
            if message not in (policy.idle_reason or ""):  # said once, not at every try
                self._event(policy.id, "prepare_failed", message)
            with self.database.write() as session:
                self._rest(session, policy.id, message)
            return False
        with self.database.write() as session:
            add_version_zero(
                session, policy.id, path=written.path, sha256=written.sha256, adapter_name=written.adapter_name
            )
        return True

    def _learn(self, policy_id: UUID) -> None:
        with self.database.write() as session:
            claim = claim_update(session, policy_id, owner=self.owner, ttl_s=LEASE_TTL_S)
        if isinstance(claim, Idle):
            return
        log.info("update_claimed", policy=claim.policy_name, update=str(claim.update_id), rollouts=len(claim.rollouts))
        self._keep_lease(claim, train)

    def pretrain(self, policy_id: UUID, epochs: int) -> UUID | Idle:
        """Trains a policy's critic on its logged history: an update that makes no version and changes no rollout.

        Returns:
            The update's id, done or failed; why there was none.
        """
        with self.database.read() as session:
            policy = session.get_one(Policy, policy_id)
            logged = has_history(session, policy_id)
        claim: Claim | Idle
        if logged:
            with self.database.write() as session:
                claim = claim_pretraining(session, policy_id, owner=self.owner, ttl_s=LEASE_TTL_S)
        else:
            warm_up = policy.settings.get("critic_warmup_updates", "its")
            claim = Idle(
                f"no_history: {policy.name} has no trained or ready rollouts; its first {warm_up} updates train the "
                "critic alone (critic_warmup_updates)"
            )
        if isinstance(claim, Idle):
            return claim
        with self.database.read() as session:
            claim = with_history(session, claim)
        self._keep_lease(claim, partial(pretrain_value, epochs=epochs))
        with self.database.write() as session:
            update = session.get_one(Update, claim.update_id)
            if update.state == UpdateState.DONE and update.health is not None:
                message = in_words(claim.policy_name, update.health)
                add_event(session, "value_pretrained", message, policy_id=policy_id, data={"update_id": str(update.id)})
        return claim.update_id

    def _keep_lease(self, claim: Claim, train: Train) -> None:
        with LeaseKeeper(lambda: self._renew(claim.update_id)) as lease:
            try:
                self._update(claim, lease, train)
            except LeaseLost as error:
                remove_files(claim, self._artifacts)
                self._event(claim.policy_id, "lease_lost", f"The work of an update was thrown away: {error}")

    def _renew(self, update_id: UUID) -> bool:
        with self.database.write() as session:
            if not renew_lease(session, update_id, self.owner, LEASE_TTL_S):
                return False
            if self._stopping_since is None or time.monotonic() - self._stopping_since < FINISHES_WITHIN_S:
                return True
            why = f"the learner was stopped, and the update had not ended after {FINISHES_WITHIN_S:g} s"
            fail_update(session, update_id, self.owner, why, blame_rollouts=False)
            return False

    def _update(self, claim: Claim, lease: LeaseKeeper, train: Train) -> None:
        """From claim to commit.

        Raises:
            LeaseLost: the update is no longer ours; nothing of it is committed.
            SQLAlchemyError: the database went away. Its files are left to the sweep, for it may have been committed.
        """
        started = time.perf_counter()
        try:
            state = self._take_state(claim)
        except MACHINE_ERRORS as error:
            self._give_back(claim, f"The learner's state could not be loaded: {error}")
            return
        loaded = time.perf_counter()
        try:
            trained = train(claim, state)
        except STEP_ERRORS as error:
            log.error("update_failed", update=str(claim.update_id), exc_info=True)
            with self.database.write() as session:
                fail_update(session, claim.update_id, self.owner, f"{type(error).__name__}: {error}")
            return
        if lease.lost.is_set():
            raise LeaseLost(f"the lease on update {claim.update_id} was lost while it trained")
        written = time.perf_counter()
        try:
            write_checkpoint(claim, state, self._artifacts)
            new = write_version(claim, state, self._artifacts) if trained.result.policy_changed else None
        except MACHINE_ERRORS as error:
            remove_files(claim, self._artifacts)
            self._give_back(claim, f"The files of an update could not be written: {error}")
            return
        ended = time.perf_counter()
        seconds = trained.result.seconds | {
            "load": loaded - started,
            "files": ended - written,
            "total": ended - started,
        }
        with self.database.write() as session:
            number = commit_update(
                session, claim.update_id, self.owner, update_done(claim, state, trained, new, seconds)
            )
            if trained.drift is not None:
                message = f"{claim.policy_name}: {trained.drift.in_words()}."
                data = {"update_id": str(claim.update_id), **asdict(trained.drift)}
                add_event(session, "drift", message, policy_id=claim.policy_id, data=data)
        if trained.drift is not None:  # once the event is there
            log.warning("drift", message=message, **data)
        head = claim.head if new is None or number is None else replace(new, number=number)
        self._state = state.after(claim.update_id, head)
        log.info(
            "update_committed",
            policy=claim.policy_name,
            update=str(claim.update_id),
            version=number,
            seconds={phase: round(spent, 3) for phase, spent in seconds.items()},
        )
        self._sweep(claim)

    def _take_state(self, claim: Claim) -> LearnerState:
        """The state that the claim continues, out of memory or from disk. Memory is empty afterwards."""
        state, self._state = self._state, None
        if state is not None and state.is_that_of(claim):
            return state
        del state  # two models at once may not fit
        return load_state(claim, resolve_dtype(self._settings.dtype, Path(claim.base_model)), self._artifacts)

    def _give_back(self, claim: Claim, message: str) -> None:
        """End an update that failed through no fault of its rollouts, and rest."""
        log.error("update_given_back", update=str(claim.update_id), exc_info=True)
        with self.database.write() as session:
            self._rest(session, claim.policy_id, message)
            fail_update(session, claim.update_id, self.owner, message, blame_rollouts=False)

    def _rest(self, session: Session, policy_id: UUID, message: str) -> None:
        """Leave a policy alone for a while, and say so where an operator looks."""
        self._resting_until[policy_id] = time.monotonic() + REST_S
        note_idle(session, policy_id, f"resting: {message}; tries again in {REST_S:g} s")

    def _event(self, policy_id: UUID, kind: str, message: str) -> None:
        log.error(kind, policy_id=str(policy_id), message=message)
        with self.database.write() as session:
            add_event(session, kind, message, policy_id=policy_id)

    def _sweep(self, claim: Claim) -> None:
        with self.database.read() as session:
            directories = version_directories(session, claim.policy_id)
        try:
            sweep_files(claim, directories, self._artifacts)
        except OSError as error:
            # left-over files harm nobody; the next update sweeps again
            log.warning("sweep_failed", error=str(error))
