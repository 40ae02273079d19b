"""Requests per second of an engine under the tickets load, and of plain `generate` on the same prompts.

    python -m benchmarks.engine [--model DIR] [--concurrency 32] [--seconds 30] [--url http://... of a running vLLM]

The load: prompts of about 170 tokens that share about 150, at most 6 new tokens, and a new adapter every 15 seconds.
CPU seconds are the engine's own: they say what it costs when other processes have the cores.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import httpx
import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from app.engine.client import ControlClient, EngineClient, Sampling
from app.settings import Settings
from benchmarks.machine import machine, versions
from learner.prepare import ensure_base_model

PREFIX_TOKENS, TICKET_TOKENS, MAX_TOKENS = 150, 20, 6
SWITCH_S = 15.0
RANK = 16
VOCABULARY = range(1000, 20000)


@dataclass
class Load:
    """A closed loop: each of the agents asks again as soon as it is answered."""

    url: str
    stop_at: float
    adapter: str
    latencies: list[float] = field(default_factory=list)
    tokens: int = 0

    async def agent(self, client: EngineClient, seed: int) -> None:
        rng = random.Random(seed)
        while time.perf_counter() < self.stop_at:
            started = time.perf_counter()
            done = await client.complete(self.url, self.adapter, prompt(rng), Sampling(MAX_TOKENS))
            self.latencies.append(time.perf_counter() - started)
            self.tokens += len(done.token_ids)

    async def run(self, concurrency: int, switches: list[tuple[float, str]]) -> None:
        client = EngineClient(timeout_s=120)
        try:
            async with asyncio.TaskGroup() as group:
                for seed in range(concurrency):
                    group.create_task(self.agent(client, seed))
                for at, adapter in switches:
                    await asyncio.sleep(max(0.0, at - time.perf_counter()))
                    self.adapter = adapter
        finally:
            await client.aclose()


def prompt(rng: random.Random) -> list[int]:
    return random.Random(0).choices(VOCABULARY, k=PREFIX_TOKENS) + rng.choices(VOCABULARY, k=TICKET_TOKENS)


def write_adapters(model: Path, directory: Path, count: int) -> list[Path]:
    """Rank-16 adapters over all linear layers with a small random B."""
    peft_model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
    )
    paths = []
    for number in range(count):
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=1e-3)
        paths.append(directory / f"bench-v{number}")
        peft_model.save_pretrained(paths[-1])
    return paths


def report(name: str, load: Load, seconds: float) -> None:
    ordered = sorted(load.latencies)
    typer.echo(
        f"{name}: {len(ordered) / seconds:.1f} requests/s, {load.tokens / seconds:.0f} new tokens/s, latency "
        f"p50 {ordered[len(ordered) // 2]:.2f} s, p99 {ordered[int(len(ordered) * 0.99)]:.2f} s"
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_engine(
    target: str, name: str, adapters: list[Path], concurrency: int, seconds: float, pid: int | None
) -> None:
    control = ControlClient()
    while not control.health(target):
        time.sleep(0.2)
    for path in adapters:
        control.load_adapter(target, path.name, str(path))
    warm_up = Load(target, time.perf_counter() + 3, adapters[0].name)
    asyncio.run(warm_up.run(concurrency, []))
    started, used = time.perf_counter(), cpu_seconds(pid) if pid else 0.0
    load = Load(target, started + seconds, adapters[0].name)
    asyncio.run(load.run(concurrency, [(started + SWITCH_S * n, path.name) for n, path in enumerate(adapters) if n]))
    report(name, load, time.perf_counter() - started)
    if pid:
        typer.echo(f"{1e3 * (cpu_seconds(pid) - used) / len(load.latencies):.0f} CPU ms a request")
    figures = httpx.get(f"{target}/metrics", trust_env=False).text.splitlines()
    typer.echo("\n".join(line for line in figures if line.startswith("evergreen_engine")))
    for path in adapters:
        control.unload_adapter(target, path.name)


def measure_generate(model: Path, adapter: Path, concurrency: int, dtype: str, seconds: float) -> None:
    """Static batches of `generate`: a batch ends when its longest completion does, and shares nothing."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    lm.load_adapter(str(adapter))
    rng, finished, started, used = random.Random(1), 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        ids = torch.tensor([prompt(rng) for _ in range(concurrency)])
        lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=True)
        finished += concurrency
    typer.echo(
        f"generate, batches of {concurrency}: {finished / (time.perf_counter() - started):.1f} requests/s, "
        f"{1e3 * (time.process_time() - used) / finished:.0f} CPU ms a request"
    )


def main(
    model: Annotated[Path | None, typer.Option(help="Model directory; EVERGREEN_MODEL if absent.")] = None,
    concurrency: int = 32,
    seconds: float = 30.0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    threads: int = 1,
    url: Annotated[str | None, typer.Option(help="A running engine; without it the embedded one is started.")] = None,
    port: int = 21700,
    generate: Annotated[bool, typer.Option(help="Measure plain generate too.")] = True,
) -> None:
    torch.set_num_threads(threads)
    typer.echo(json.dumps({"machine": machine(), "versions": versions()}))
    model = model or ensure_base_model(Settings(dtype=dtype))
    with tempfile.TemporaryDirectory() as directory:
        adapters = write_adapters(model, Path(directory), 1 + int(seconds // SWITCH_S))
        if url:
            measure_engine(url, url, adapters, concurrency, seconds, None)
        else:
            command = [sys.executable, "-m", "app.engine.embedded", "--model", str(model), "--dtype", dtype]
            process = subprocess.Popen([*command, "--port", str(port), "--threads", str(threads)])
            try:
                name = f"embedded, {dtype}, {threads} threads, {concurrency} at once"
                measure_engine(f"http://127.0.0.1:{port}", name, adapters, concurrency, seconds, process.pid)
            finally:
                process.terminate()
                process.wait()
        if generate:
            measure_generate(model, adapters[0], concurrency, dtype, seconds)


if __name__ == "__main__":
    typer.run(main)
