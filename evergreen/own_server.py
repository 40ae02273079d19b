"""`evergreen up` in a fresh home of its own, for what plays whole runs: benchmarks and experiments."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from evergreen.child import die_with

READY_WITHIN_S = 600
STOPS_WITHIN_S = 90
PASSED_ON = ("EVERGREEN_MODEL", "EVERGREEN_DTYPE")
"""Settings of this process that its servers inherit."""
ALIASES = ("DATABASE_URL", "BROKER_URL")
"""Settings without the prefix EVERGREEN_."""


class NotReady(RuntimeError):
    """The server did not start; what it has printed says why."""


@contextmanager
def own_server(home: Path, port: int, settings: Mapping[str, str]) -> Iterator[tuple[httpx.Client, dict[str, str]]]:
    """Runs until the block ends; yields an admin client and the environment that `evergreen simulate` needs.

    home: what its log is named after, beside it. port: the app's; the engine takes the next one. settings: further
    environment variables of the server; of this process's settings it gets those of PASSED_ON alone.

    Raises:
        NotReady: it ended, or was not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    environment = {
        **_inherited(os.environ),
        "EVERGREEN_HOME": str(home),
        "EVERGREEN_PORT": str(port),
        "EVERGREEN_ENGINE_PORT": str(port + 1),
        "EVERGREEN_URL": url,
        **settings,
    }
    log_path = home.parent / f"{home.name}.log"
    with log_path.open("w") as log:
        up = subprocess.Popen(
            evergreen("up"), env=environment, stdout=log, stderr=log, preexec_fn=die_with(os.getpid())
        )
    try:
        try:
            wait_until_ready(url, up)
        except NotReady as error:
            raise NotReady(f"{error}; see {log_path}") from error
        key = (home / "admin.key").read_text().strip()
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as admin:
            yield admin, environment | {"EVERGREEN_API_KEY": key}
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """All but settings that would change what is measured without being written anywhere, a preset for example."""
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED_ON or not (name.startswith("EVERGREEN_") or name in ALIASES)
    }


def evergreen(*arguments: str) -> list[str]:
    """The command line of this installation's `evergreen`."""
    return [sys.executable, "-P", "-m", "evergreen.cli", *arguments]


def wait_until_ready(url: str, up: subprocess.Popen[bytes] | None) -> None:
    """up: the child that is to serve there; None: it is somebody else's.

    Raises:
        NotReady: the child has ended, or nothing was ready within READY_WITHIN_S.
    """
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if up is not None and up.poll() is not None:
            raise NotReady(f"`evergreen up` ended with status {up.returncode}")
        try:
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.5)
    raise NotReady(f"the server was not ready within {READY_WITHIN_S} s")
