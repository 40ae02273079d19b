"""Deleting directories under artifacts/, where a learner's sweep and retention may be at the same ones at once."""

import shutil
from pathlib import Path
from typing import Any


def modified_ns(path: Path) -> int | None:
    """None: it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def is_older_than(path: Path, before: float) -> bool:
    """Whether it was last modified before that Unix time; not what is gone."""
    modified = modified_ns(path)
    return modified is not None and modified < before * 1e9


def delete_directory(path: Path) -> None:
    """What somebody else deletes meanwhile is no error."""
    shutil.rmtree(path, onerror=_raise_unless_gone)


def _raise_unless_gone(function: Any, path: str, error: Any) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
