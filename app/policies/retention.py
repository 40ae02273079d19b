"""Retention: files that nobody needs any more. The database decides first, then files go; a crash leaves orphans only.

Directories are named after updates (docs/architecture.md, Contract 4). What no row refers to is deleted once it is
older than any work in progress can be; that takes temporary directories of killed processes too.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import structlog

from app.db.models import Policy
from app.db.repositories.events import add_event
from app.db.repositories.policies import list_policies
from app.db.repositories.retention import clear_bodies, spent_checkpoints, take_old_versions, version_directories
from app.db.repositories.rollouts import as_uuid
from app.db.session import Database
from app.policies.files import delete_directory, is_older_than

ORPHAN_AGE_S = 3600.0
BODIES_AT_ONCE = 500
BODIES_PER_CALL = 20_000

log = structlog.get_logger()


class Retention:
    """One per control process.

    Args:
        artifacts: holds <policy>/versions and <policy>/checkpoints.
        bodies_kept_days: request and response bytes older than this are dropped from the database.
    """

    def __init__(self, database: Database, artifacts: Path, bodies_kept_days: float):
        self._database = database
        self._artifacts = artifacts
        self._bodies_kept_days = bodies_kept_days
        self._cleared_to = UUID(int=0)
        self._refused: set[UUID] = set()

    def tick(self) -> None:
        with self._database.read() as session:
            policies = list_policies(session)
        for policy in policies:
            self._versions(policy)
            self._checkpoints(policy)
        self._bodies()

    def _versions(self, policy: Policy) -> None:
        folder = self._artifacts / policy.name / "versions"
        with self._database.read() as session:
            needed = version_directories(session, policy.id).needed
        missing = sorted(name for name in needed if not (folder / name).is_dir())
        if missing:
            self._refuse(policy, folder, missing)
            return
        self._refused.discard(policy.id)
        with self._database.write() as session:
            old = [Path(version.path).name for version in take_old_versions(session, policy.id)]
        for name in old:
            _delete(folder / name)
        with self._database.read() as session:
            kept = version_directories(session, policy.id).kept
        for path in _directories(folder):
            if path.name not in kept and _is_old(path):
                _delete(path)

    def _refuse(self, policy: Policy, folder: Path, missing: Sequence[str]) -> None:
        """Say it once: a database that speaks of files that are not here must not decide which of these go."""
        if policy.id in self._refused:
            return
        self._refused.add(policy.id)
        message = f"No files of {policy.name} are deleted: {', '.join(missing)} (live or head) is not in {folder}."
        log.error("retention_refused", policy=policy.name, missing=missing)
        with self._database.write() as session:
            add_event(session, "retention_refused", message, policy_id=policy.id)

    def _checkpoints(self, policy: Policy) -> None:
        """A learner deletes what each of its updates supersedes; this takes what one that is gone has left."""
        old = [path for path in _directories(self._artifacts / policy.name / "checkpoints") if _is_old(path)]
        found = {update_id: path for path in old if (update_id := as_uuid(path.name)) is not None}
        with self._database.read() as session:
            spent = spent_checkpoints(session, policy.id, found)
        for update_id in spent:
            _delete(found[update_id])
        for path in old:
            if path.name.startswith("."):
                _delete(path)

    def _bodies(self) -> None:
        for _ in range(BODIES_PER_CALL // BODIES_AT_ONCE):
            with self._database.write() as session:
                last = clear_bodies(session, self._cleared_to, self._bodies_kept_days, BODIES_AT_ONCE)
            if last is None:
                return
            self._cleared_to = last


def _directories(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _is_old(path: Path) -> bool:
    return is_older_than(path, time.time() - ORPHAN_AGE_S)


def _delete(path: Path) -> None:
    if path.is_dir():
        delete_directory(path)
        log.info("files_deleted", path=str(path))
