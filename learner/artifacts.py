"""Files under artifacts/: where they lie, and how a directory appears whole or not at all.

A directory is written under a temporary name, every file and directory in it is fsynced, and one rename publishes it.
Paths and adapter names are never used twice: an engine's prefix cache is keyed by them.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

from app.policies.files import delete_directory, is_older_than

TEMPORARY_PREFIX = ".tmp-"
PIECE = 2**20
"""Bytes read at once."""


def version_name(policy: str, number: int, update_id: UUID) -> str:
    """The adapter's name and its directory's; version 0 takes the policy's id in the update's place."""
    return f"{policy}-v{number}-{update_id}"


def version_dir(artifacts_dir: Path, policy: str, number: int, update_id: UUID) -> Path:
    return artifacts_dir / policy / "versions" / version_name(policy, number, update_id)


def checkpoint_dir(artifacts_dir: Path, policy: str, update_id: UUID) -> Path:
    return artifacts_dir / policy / "checkpoints" / str(update_id)


@contextmanager
def published(final: Path) -> Iterator[Path]:
    """Yields an empty temporary directory beside `final`; `final` exists, complete and durable, after the block.

    If the block raises, the temporary directory is removed and nothing is published.

    Raises:
        FileExistsError: `final` exists already (also when another process published it meanwhile).
    """
    temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish(temporary: Path, final: Path) -> None:
    """Fsyncs everything in `temporary` and renames it to `final` (same parent directory).

    Raises:
        FileExistsError: `final` exists already; `temporary` is left alone.
    """
    for directory, _, files in os.walk(temporary, topdown=False):
        for name in files:
            _fsync(Path(directory, name))
        _fsync(Path(directory))
    if final.exists():  # renaming onto an empty directory would succeed
        raise FileExistsError(f"{final} exists already; an artifact's path is never used twice")
    try:
        temporary.rename(final)
    except OSError as error:
        if final.exists():
            raise FileExistsError(f"{final} exists already; an artifact's path is never used twice") from error
        raise
    _fsync(final.parent)


def sha256_of(directory: Path) -> str:
    """Hex SHA-256 over the directory's files, names and contents, in sorted order of their relative names."""
    return sha256_of_files(directory, (p for p in directory.rglob("*") if p.is_file()))


def sha256_of_files(directory: Path, files: Iterable[Path]) -> str:
    """The same over some of the files in it."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(directory).as_posix().encode()
        digest.update(len(name).to_bytes(8, "big") + name)
        with path.open("rb") as file:
            digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "big"))  # keeps ("ab", "c") and ("a", "bc") apart
            while piece := file.read(PIECE):  # a model may be larger than memory has room for twice
                digest.update(piece)
    return digest.hexdigest()


def sweep_unreferenced(parent: Path, keep: Collection[str], older_than_s: float) -> list[Path]:
    """Deletes the directories in `parent` (a versions/ or checkpoints/ directory) whose names are not among
    `keep`.

    Young ones are spared: an update writes its files before the database knows of them.

    Returns:
        The deleted directories.
    """
    if not parent.is_dir():
        return []
    limit = time.time() - older_than_s
    children = [p for p in sorted(parent.iterdir()) if p.is_dir()]  # lock files stay
    swept = [p for p in children if p.name not in keep and is_older_than(p, limit)]
    for path in swept:
        delete_directory(path)
    return swept


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
