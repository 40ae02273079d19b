"""Start the product's processes in tests, and wait for what they do."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def eventually(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Poll until `condition` holds; fail with `what` otherwise."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)


@contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child process whose output goes to `log`; killed at the end."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
