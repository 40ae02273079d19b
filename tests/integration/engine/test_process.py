"""The embedded engine as a process: how it ends."""

import os
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.contract.tiny_model import build_base_model

FAILING_STEP = """
from app.engine.embedded import __main__, engine

def step(self):
    raise RuntimeError("patched to fail")

engine.Engine.step = step
__main__.typer.run(__main__.serve)
"""
PORT = 21801


def start(arguments: list[str], base: Path, port: int) -> subprocess.Popen[bytes]:
    flags = ["--model", str(base), "--port", str(port), "--dtype", "float32", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, *arguments, *flags], stderr=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    deadline = time.monotonic() + 240
    with httpx.Client(trust_env=False, verify=False) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.get(f"http://127.0.0.1:{port}/health")
                return process
            except httpx.TransportError:
                time.sleep(0.2)
    process.kill()
    _, errors = process.communicate()
    raise RuntimeError(f"the engine did not start: {errors.decode()[-2000:]}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base_model(tmp_path_factory.mktemp("engine-process") / "base")


def test_a_failed_forward_pass_answers_with_an_error_and_ends_the_process(base: Path) -> None:
    process = start(["-c", FAILING_STEP], base, PORT)
    try:
        answer = httpx.post(
            f"http://127.0.0.1:{PORT}/v1/completions", json={"prompt": [5, 6]}, trust_env=False, timeout=30
        )
        assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert b"patched to fail" in errors
    finally:
        process.kill()
        process.wait()


def test_an_idle_connection_outlives_the_clients_patience(base: Path) -> None:
    """httpx uses a connection again until it has been idle for 5 s, which was uvicorn's limit too."""
    process = start(["-m", "app.engine.embedded"], base, PORT + 2)
    connection = HTTPConnection("127.0.0.1", PORT + 2, timeout=30)
    try:
        for pause in (6.0, 0.0):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""
            time.sleep(pause)
    finally:
        connection.close()
        process.kill()
        process.wait()


def test_sigterm_ends_it_although_a_client_reads_slowly(base: Path) -> None:
    process = start(["-m", "app.engine.embedded"], base, PORT + 1)
    body = {"prompt": [5, 6], "max_tokens": 200, "stream": True, "ignore_eos": True}
    try:
        with httpx.stream(
            "POST", f"http://127.0.0.1:{PORT + 1}/v1/completions", json=body, trust_env=False, timeout=30
        ) as response:
            next(response.iter_bytes())
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
