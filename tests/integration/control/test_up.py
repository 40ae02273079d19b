"""`evergreen up` as a whole on a tiny random model: it serves, comes back after kill -9 of any part, and drains."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from evergreen.home import read_states
from tests.contract.tiny_model import build_base_model
from tests.integration.control.processes import ROOT, eventually, process
from tests.integration.control.test_supervisor import alive, wait_for_pid
from tests.tiny_tokenizer import SMOLLM2_TEMPLATE

NAMES = ("engine", "app", "beat", "control", "learn")
WORKS = {"control": "SELECT max(seen_at) FROM replicas", "learn": "SELECT max(learner_seen_at) FROM policies"}
"""What shows, per worker, when it last did its work."""


class Server:
    def __init__(self, home: Path, environment: dict[str, str]):
        self.home = home
        self.environment = environment
        self.url = f"http://127.0.0.1:{environment['EVERGREEN_PORT']}"

    @property
    def key(self) -> str:
        return (self.home / "admin.key").read_text().strip()

    def chat(self) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {self.key}"},
            json={"model": "default", "max_tokens": 3, "messages": [{"role": "user", "content": "red or green?"}]},
            timeout=30,
            trust_env=False,
        )

    def answers(self) -> bool:
        try:
            return self.chat().status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def last_worked(self, name: str) -> str:
        with closing(sqlite3.connect(f"file:{self.home / 'evergreen.db'}?mode=ro", uri=True)) as database:
            (at,) = database.execute(WORKS[name]).fetchone()
        return str(at)

    def pids(self) -> dict[str, int]:
        return {name: wait_for_pid(self.home, name, within_s=60) for name in NAMES}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "evergreen.cli", *arguments], env=os.environ | self.environment, cwd=self.home,
            capture_output=True, text=True,
        )  # fmt: skip


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("up")
    base = build_base_model(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.save_pretrained(base)
    home = folder / "home"
    environment = {
        "PYTHONPATH": str(ROOT), "EVERGREEN_HOME": str(home), "EVERGREEN_MODEL": str(base),
        "EVERGREEN_DTYPE": "float32", "EVERGREEN_PORT": free_port(), "EVERGREEN_ENGINE_PORT": free_port(),
    }  # fmt: skip
    with process([sys.executable, "-m", "evergreen.cli", "up"], folder / "console", **environment) as up:
        running = Server(home, environment)
        eventually(lambda: "Evergreen is ready" in (folder / "console").read_text() or up.poll() is not None,
                   within_s=120, what="readiness")  # fmt: skip
        assert up.poll() is None, (folder / "console").read_text()
        yield running
        # the end is part of what is shown: everything drains and nothing is left
        pids = running.pids()
        up.terminate()
        assert up.wait(timeout=90) == 0
        assert not any(alive(pid) for pid in pids.values())


def test_it_serves_and_says_how_to_ask(server: Server) -> None:
    console = (server.home.parent / "console").read_text()
    assert f"Evergreen is ready at {server.url}" in console
    assert str(server.home / "admin.key") in console
    assert (server.home / "admin.key").stat().st_mode & 0o777 == 0o600
    reply = server.chat()
    assert reply.status_code == httpx.codes.OK, reply.text
    assert reply.headers["X-Policy-Version"] == "0"


def test_a_second_up_in_the_same_home_says_who_holds_it(server: Server) -> None:
    second = server.run("up")
    assert second.returncode == 1
    assert re.search(r"in use by process \d+", second.stderr)


def test_status_shows_the_processes_and_the_policy(server: Server) -> None:
    eventually(lambda: server.last_worked("learn") != "None", within_s=60, what="the learner to look at the policy")
    shown = server.run("status")
    assert shown.returncode == 0
    for word in (*NAMES, "running", "default", "too_few_rollouts"):
        assert word in shown.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_process_is_back_and_the_server_answers(server: Server, name: str) -> None:
    killed = server.pids()[name]
    os.killpg(killed, signal.SIGKILL)
    before = time.monotonic()
    wait_for_pid(server.home, name, other_than=killed, within_s=60)
    eventually(server.answers, within_s=60, what=f"an answer after {name} was killed")
    for worker in WORKS:
        seen = server.last_worked(worker)
        eventually(lambda: server.last_worked(worker) > seen, within_s=60, what=f"{worker} at work")  # noqa: B023
    assert time.monotonic() - before < 60


def test_everything_killed_at_once_is_back_within_a_minute(server: Server) -> None:
    for pid in server.pids().values():
        os.killpg(pid, signal.SIGKILL)
    before = time.monotonic()
    eventually(lambda: not server.answers(), within_s=5, what="the end")
    eventually(server.answers, within_s=60, what="an answer")
    assert time.monotonic() - before < 60
    assert {state.last_death for state in read_states(server.home)} == {"killed by SIGKILL"}
