"""The files of one update: its checkpoint and its version's weights, in place before the database knows of them."""

import shutil
from pathlib import Path

from app.db.repositories.retention import VersionDirectories
from app.rollouts.claimed import Claim, VersionRef
from learner.artifacts import (
    TEMPORARY_PREFIX,
    checkpoint_dir,
    published,
    sha256_of,
    sweep_unreferenced,
    version_dir,
    version_name,
)
from learner.checkpoint import keep_newest, save_checkpoint
from learner.state import LearnerState

ORPHANED_AFTER_S = 3600.0
"""Files that nothing refers to are swept at this age: by then no update that could still commit is writing them."""


def write_checkpoint(claim: Claim, state: LearnerState, artifacts_dir: Path) -> None:
    with published(checkpoint_dir(artifacts_dir, claim.policy_name, claim.update_id)) as directory:
        save_checkpoint(
            directory,
            state.model,
            state.optimisers,
            update_id=claim.update_id,
            updates_done=claim.updates_done + 1,
            recent_returns=state.recent_returns,
            recent_residuals=state.recent_residuals,
        )


def write_version(claim: Claim, state: LearnerState, artifacts_dir: Path) -> VersionRef:
    """The adapter or model that engines load. Path and name hold the update's id: they are never used twice."""
    number = claim.head.number + 1
    final = version_dir(artifacts_dir, claim.policy_name, number, claim.update_id)
    with published(final) as directory:
        state.model.export_policy(directory)
    return VersionRef(number, str(final), sha256_of(final), version_name(claim.policy_name, number, claim.update_id))


def remove_files(claim: Claim, artifacts_dir: Path) -> None:
    """Whatever this update has written, after the database has refused it."""
    number = claim.head.number + 1
    for directory in (
        version_dir(artifacts_dir, claim.policy_name, number, claim.update_id),
        checkpoint_dir(artifacts_dir, claim.policy_name, claim.update_id),
    ):
        shutil.rmtree(directory, ignore_errors=True)


def sweep_files(claim: Claim, directories: VersionDirectories, artifacts_dir: Path) -> None:
    """After the claim's update was committed: older checkpoints, and what crashed updates have left.

    Raises:
        FileNotFoundError: the head's or the live version's files are not here; no version is deleted then.
    """
    current = checkpoint_dir(artifacts_dir, claim.policy_name, claim.update_id)
    keep_newest(current.parent, current)
    finished = [path.name for path in current.parent.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)]
    sweep_unreferenced(current.parent, finished, ORPHANED_AFTER_S)
    versions = version_dir(artifacts_dir, claim.policy_name, claim.head.number, claim.update_id).parent
    missing = sorted(name for name in directories.needed if not (versions / name).is_dir())
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)} (live or head) is not in {versions}: no version is deleted")
    sweep_unreferenced(versions, directories.kept, ORPHANED_AFTER_S)
