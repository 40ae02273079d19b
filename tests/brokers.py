"""Redis and RabbitMQ for tests: the server that answers on its usual port, else one of our own. Never a skip."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

REDIS_PORT = 6379
RABBITMQ_PORT = 5672
STARTS_WITHIN_S = 60.0


@contextmanager
def redis_server(folder: Path, usual_port: int = REDIS_PORT) -> Iterator[str]:
    """URL without a database number; `folder` is where one that has to be started runs."""
    if _answers(usual_port):
        yield f"redis://127.0.0.1:{usual_port}"
        return
    port = _free_port()
    command = [_program("redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with _own(command, port, folder, {}):
        yield f"redis://127.0.0.1:{port}"


@contextmanager
def rabbitmq_server(folder: Path, usual_port: int = RABBITMQ_PORT) -> Iterator[str]:
    """URL of the default virtual host; `folder` holds the data of one that has to be started."""
    if _answers(usual_port):
        yield f"amqp://guest:guest@127.0.0.1:{usual_port}//"
        return
    port, distribution_port = _free_port(), _free_port()
    environment = {
        "RABBITMQ_NODENAME": f"evergreen-{port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port), "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"), "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"), "HOME": str(folder),
        # the machine's own settings name the usual port
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"), "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "ERL_EPMD_ADDRESS": "127.0.0.1", "RABBITMQ_CONFIG_FILES": str(folder / "none"),
    }  # fmt: skip
    # the script beside the server's own files, which does not change to another user as the one on PATH does
    script = next(Path("/usr/lib/rabbitmq").glob("lib/rabbitmq_server-*/sbin/rabbitmq-server"), None)
    with _own([str(script or _program("rabbitmq-server"))], port, folder, environment):
        yield f"amqp://guest:guest@127.0.0.1:{port}//"


@contextmanager
def _own(command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    folder.mkdir(parents=True)
    with (folder / "output").open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not start:\n{(folder / 'output').read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait(30)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"the brokers are tested too: run {name} on its usual port, or install it")
    return found


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
