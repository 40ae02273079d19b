"""An experiment's runs on servers of their own, with a tiny random model; slow because each is a whole server."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.contract.tiny_model import build_base_model
from tests.tiny_tokenizer import SMOLLM2_TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def two_free_ports() -> int:
    """The first of two neighbours that nobody listens on."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def experiment(out: Path, model: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "evergreen.cli", "experiment", "online", "--env", "tickets"]
    command += ["--arms", "sao,running_mean", "--seeds", "1", "--rollouts-per-phase", "64", "--watch", "3"]
    command += ["--set", "value_lr=0.002"]
    return subprocess.run(
        [*command, "--out", str(out), "--port", str(port), *options],
        env=os.environ | {"EVERGREEN_MODEL": str(model), "EVERGREEN_HOME": str(out / "unused")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_arms_run_once_and_are_reported(tmp_path: Path) -> None:
    model = build_base_model(tmp_path / "model", context=2048)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.save_pretrained(model)
    out, port = tmp_path / "out", two_free_ports()
    done = experiment(out, model, port)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = {arm: json.loads((out / f"{arm}-seed-1" / "done.json").read_text())["settings"] for arm in
                ("sao", "running_mean")}  # fmt: skip
    assert {k for k in settings["sao"] if settings["sao"][k] != settings["running_mean"][k]} == {"advantage"}
    assert {of["value_lr"] for of in settings.values()} == {0.002}
    with (out / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["phase"], row["rollouts"]) for row in rows] == [
        (arm, phase, "64") for arm in ("sao", "running_mean") for phase in ("1", "2", "3")
    ]
    assert (out / "report.html").exists()
    assert not (out / "sao-seed-1" / "home").exists()

    (out / "running_mean-seed-1" / "done.json").unlink()  # as if it had been stopped half way
    first = (out / "sao-seed-1" / "updates.csv").stat().st_mtime_ns
    again = experiment(out, model, port)
    assert "sao-seed-1: done already" in again.stdout
    assert "running_mean-seed-1 ..." in again.stdout
    assert (out / "sao-seed-1" / "updates.csv").stat().st_mtime_ns == first
    other = experiment(out, model, port, "--rollouts-per-phase", "96")
    assert other.returncode == 1
    assert "rollouts_per_phase was 64 and is now 96" in other.stderr
    changed = experiment(out, model, port, "--set", "value_lr=0.003")
    assert "settings.value_lr was 0.002 and is now 0.003" in changed.stderr
