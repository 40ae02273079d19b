"""A version rebuilt from version 0, or from the nearest kept checkpoint, and the database alone.

The same code trains it as trained the original, in the same order and with the settings of each update. Weights are
bit-equal where what `provenance` of an update names is equal: library versions, device and CPU capability, dtype and
number of threads.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.policies.files import delete_directory
from app.rollouts.claimed import VersionRef
from app.rollouts.recorded import NotRecorded, RecordedUpdate, chain_of, recorded
from app.settings import Settings
from learner.artifacts import checkpoint_dir
from learner.pretraining import pretrain_value
from learner.state import LearnerState, load_state
from learner.update import step
from learner.update_files import write_checkpoint, write_version


@dataclass(frozen=True)
class Replayed:
    """One update made again."""

    update: RecordedUpdate
    made: VersionRef | None
    """The version made again, in files that go when the replay goes on; None: only the critic learned."""
    largest_difference: float | None
    """Between its weights and the original's; None: they are equal, or the original's files are gone."""

    @property
    def equal(self) -> bool:
        """Whether the version's SHA-256 is the original's; an update that made none has nothing to compare."""
        original = self.update.made
        return self.made is None or (original is not None and self.made.sha256 == original.sha256)


def replay(
    database: Database, settings: Settings, policy_name: str, to: int, start: int | None = None
) -> Iterator[Replayed]:
    """Makes the updates that led to version `to` again, one by one, and compares the SHA-256 of each version.

    start: the version whose checkpoint is continued, or 0; None: the nearest before `to` that is kept.

    Raises:
        NotRecorded: rollouts, updates or the checkpoint to start from are missing; the message names them.
        CheckpointMismatch: files do not belong together.
    """
    with database.read() as session:
        policy = get_policy(session, policy_name)
        updates = [recorded(session, policy, u, i) for i, u in enumerate(chain_of(session, policy, to))]
    first = _first(updates, policy.name, settings.artifacts_dir, start)
    with tempfile.TemporaryDirectory(prefix="evergreen-replay-") as scratch:
        yield from _run(updates[first:], settings, Path(scratch))


def _first(updates: Sequence[RecordedUpdate], policy: str, artifacts: Path, start: int | None) -> int:
    """Index of the first update to make again."""
    if start == 0:
        return 0
    kept = {
        i + 1: (update.made or update.claim.head).number
        for i, update in enumerate(updates[:-1])
        if checkpoint_dir(artifacts, policy, update.claim.update_id).is_dir()
    }
    if start is None:
        return max(kept, default=0)
    for first, version in kept.items():
        if version == start:
            return first
    have = ", ".join(map(str, sorted({0, *kept.values()})))
    raise NotRecorded(f"the checkpoint of version {start} is not kept; a replay can start from {have}")


def _run(updates: Sequence[RecordedUpdate], settings: Settings, scratch: Path) -> Iterator[Replayed]:
    torch.set_flush_denormal(True)  # as the learn worker does
    state: LearnerState | None = None
    artifacts, head = settings.artifacts_dir, None
    checkpoint: Path | None = None
    version: Path | None = None
    for update in updates:
        claim = update.claim if head is None else replace(update.claim, head=head)
        torch.set_num_threads(update.provenance["threads"])
        if state is None or not state.is_that_of(claim):  # the first, or the settings have changed
            state = load_state(claim, update.provenance["dtype"], artifacts)
        epochs = update.pretraining_epochs
        result = step(claim, state) if epochs is None else pretrain_value(claim, state, epochs).result
        artifacts = scratch
        write_checkpoint(claim, state, artifacts)
        checkpoint = _instead_of(checkpoint, checkpoint_dir(artifacts, claim.policy_name, claim.update_id))
        made = write_version(claim, state, artifacts) if result.policy_changed else None
        if made is not None:
            version = _instead_of(version, Path(made.path))
        head = claim.head if made is None else made
        state = state.after(claim.update_id, head)
        yield Replayed(update, made, None if made is None or update.made is None else _difference(made, update.made))


def _instead_of(older: Path | None, newer: Path) -> Path:
    """Only the newest files are continued: hundreds of updates must not need hundreds of times their space."""
    if older is not None:
        delete_directory(older)
    return newer


def _difference(made: VersionRef, original: VersionRef) -> float | None:
    """Largest difference of two versions' weights; None: they are equal, or the original's files are gone."""
    if made.sha256 == original.sha256 or not Path(original.path).is_dir():
        return None
    largest = 0.0
    for path in Path(made.path).glob("*.safetensors"):
        weights, others = load_file(path), load_file(Path(original.path) / path.name)
        largest = max(largest, *((weights[name].float() - others[name].float()).abs().max().item() for name in weights))
    return largest
