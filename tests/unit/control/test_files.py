"""Deleting what somebody else is deleting too."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.policies.files import delete_directory, is_older_than, modified_ns


def test_what_is_gone_is_neither_old_nor_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert not is_older_than(gone, time.time() + 60)
    assert modified_ns(gone) is None
    delete_directory(gone)


def test_age(tmp_path: Path) -> None:
    os.utime(tmp_path, (1_000, 1_000))
    assert is_older_than(tmp_path, 1_001)
    assert not is_older_than(tmp_path, 1_000)


def test_two_may_delete_the_same_at_once(tmp_path: Path) -> None:
    for _ in range(10):
        directory = tmp_path / "version"
        for name in map(str, range(50)):
            (directory / name).mkdir(parents=True)
            (directory / name / "file").touch()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(delete_directory, [directory] * 4))
        assert not directory.exists()


def test_other_errors_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        delete_directory(tmp_path / "file")
