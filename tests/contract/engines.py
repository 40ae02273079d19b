"""The engines that the contract is checked on, as real processes: the embedded one, and real vLLM if it is there."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

VLLM_PYTHON = os.environ.get("EVERGREEN_VLLM_PYTHON")
"""Interpreter of an environment with vLLM (`make vllm-contract`); without it the embedded engine alone is checked."""

MAX_LORA_RANK = 16
MAX_NUM_SEQS = 8
MAX_QUEUED = 16
_START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class RunningEngine:
    kind: str
    url: str

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; both engines use vLLM's names."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"{self.kind} has no metric {name}"
        return sum(values)


@contextmanager
def start(kind: str, base: Path, log: Path, dtype: str = "float32") -> Iterator[RunningEngine]:
    port = _free_port()
    flags = [
        *("--model", str(base), "--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-loras", "3", "--max-cpu-loras", "8", "--max-lora-rank", str(MAX_LORA_RANK)),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-queued-reqs", str(MAX_QUEUED)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if kind == "embedded":
        command = [sys.executable, "-m", "app.engine.embedded", *flags, "--threads", "1"]
    else:
        assert VLLM_PYTHON is not None
        command = [
            *(VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags, "--enable-lora"),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        ]
        environment |= {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        environment.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield RunningEngine(kind, url)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with httpx.Client(trust_env=False, verify=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the engine ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            try:
                if client.get(f"{url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
    raise RuntimeError(f"the engine did not become healthy:\n{log.read_text()[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
