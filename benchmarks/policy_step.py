"""The policy step against TRL's, on the same batches: `python -m benchmarks.policy_step` (`make bench` installs TRL).

Both take the same base model, dtype, LoRA (rank 16, all linear layers, float32), threads and tokens; each measurement
is a process of its own, ours and TRL's in turn. Ours is the paper's step (DIS, AdamW), TRL's GRPOTrainer's default loss
and AdamW on its `compute_loss`, once as fast as it goes and once with gradient checkpointing, its default. Memory is
what the process's peak rises by in its first step; the steps timed come after it. `update` is a whole SAO update with
the online defaults.

`--out` is written after every process, with the machine and the versions; started again, it goes on where it was.
"""

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any
from uuid import UUID

import torch

from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings
from app.settings import Settings, get_settings
from benchmarks.machine import machine, versions
from benchmarks.trl_step import trl_step
from evergreen.conditions import OtherConditions, check_conditions
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.prepare import ensure_base_model, write_version_zero
from learner.step import run_update
from learner.trajectory import Trajectory

CONTESTANTS = ("evergreen", "trl", "trl_checkpointing", "update")
SHAPES: dict[str, dict[str, Any]] = {
    "128/32": {"rollouts": 8, "prompt": 128, "turns": [(32, 0)]},
    "1024/128 shared": {"rollouts": 8, "prompt": 1024, "common": 960, "turns": [(128, 0)]},
    "2048/32": {"rollouts": 4, "prompt": 2048, "turns": [(32, 0)]},
    "6 turns": {"rollouts": 4, "prompt": 256, "turns": [(32, 64)] * 5 + [(32, 0)]},
}
STEPS = 1
"""Timed per process, after the first one."""
Json = dict[str, Any]
Step = Callable[[], float]
"""Takes one step; returns its seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes per contestant and shape")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "auto"), default=get_settings().dtype)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("CONTESTANT", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    base = ensure_base_model(Settings(home=get_settings().home, dtype=arguments.dtype))
    dtype = resolve_dtype(arguments.dtype, base)
    if arguments.child:
        torch.set_num_threads(arguments.threads)
        torch.set_flush_denormal(True)  # as the learn worker does
        print(json.dumps(measure(*arguments.child, base, dtype)))
        return
    conditions = {
        "machine": machine(),
        "versions": versions(),
        "model": Path(get_settings().model).name,
        "dtype": dtype,
        "threads": arguments.threads,
        "steps": STEPS,
    }
    try:
        measured = read_measured(arguments.out, conditions)
    except OtherConditions as error:
        sys.exit(str(error))
    for shape in arguments.shapes:
        for run in range(1, arguments.runs + 1):  # contestants in turn, so that a slow hour is everybody's
            for name in arguments.contestants:
                if any((one["shape"], one["contestant"], one["run"]) == (shape, name, run) for one in measured):
                    continue
                one = {"shape": shape, "contestant": name, "run": run}
                measured.append(one | measure_apart(name, shape, dtype, arguments.threads))
                if arguments.out:
                    write(arguments.out, conditions, measured)
        print(json.dumps(medians(shape, measured)), flush=True)


def read_measured(out: Path | None, conditions: Json) -> list[Json]:
    """The processes that an earlier start has measured.

    Raises:
        OtherConditions: on another machine, with other versions or otherwise.
    """
    if out is None or not out.exists():
        return []
    there = json.loads(out.read_text())
    if not isinstance(there, dict):
        raise OtherConditions(f"{out} does not say where it was measured; give another --out")
    measured: list[Json] = there.pop("measured", [])
    there.pop("medians", None)
    check_conditions(out, there, conditions)
    return measured


def write(out: Path, conditions: Json, measured: list[Json]) -> None:
    """Whole or not at all: what was measured took hours."""
    shapes = dict.fromkeys(one["shape"] for one in measured)
    result = conditions | {"medians": [medians(shape, measured) for shape in shapes], "measured": measured}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(out)


def measure_apart(contestant: str, shape: str, dtype: str, threads: int) -> Json:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.policy_step", "--child", contestant, shape]
    command += ["--dtype", dtype, "--threads", str(threads)]
    answer: Json = json.loads(subprocess.run(command, check=True, stdout=PIPE, text=True).stdout.splitlines()[-1])
    return answer


def medians(shape: str, measured: list[Json]) -> Json:
    """Of each contestant over its processes, and what ours is against TRL's."""
    tokens = sum(t.token_ids.numel() for t in batch(**SHAPES[shape]))
    result: Json = {"shape": shape, "tokens": tokens}
    of_shape = [one for one in measured if one["shape"] == shape]
    for name in dict.fromkeys(one["contestant"] for one in of_shape):
        processes = [one for one in of_shape if one["contestant"] == name]
        seconds = statistics.median(s for process in processes for s in process["seconds"])
        result[name] = {
            "runs": len(processes),
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "peak_mib": round(statistics.median(process["peak_mib"] for process in processes), 1),
        }
    for rival in ("trl", "trl_checkpointing"):
        if rival in result and "evergreen" in result:
            result[f"speed_over_{rival}"] = round(result[rival]["seconds"] / result["evergreen"]["seconds"], 2)
            result[f"peak_over_{rival}"] = round(result["evergreen"]["peak_mib"] / result[rival]["peak_mib"], 2)
    return result


def measure(contestant: str, shape: str, base: Path, dtype: Any) -> Json:
    """Loads, takes a first step for its peak memory, and times the others."""
    trajectories = batch(**SHAPES[shape])
    if contestant in ("evergreen", "update"):
        step = evergreen_step(trajectories, base, dtype, whole=contestant == "update")
    else:
        step = trl_step(trajectories, base, dtype, checkpointing=contestant == "trl_checkpointing")
    gc.collect()
    before = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc_pid_clear_refs(5))
    step()
    peak = memory_mib("VmHWM") - before
    return {"seconds": [step() for _ in range(STEPS)], "peak_mib": peak}


def memory_mib(name: str) -> float:
    """MiB of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def evergreen_step(trajectories: list[Trajectory], base: Path, dtype: Any, *, whole: bool) -> Step:
    """whole: an update with the online defaults; else the paper's policy step alone, which no critic precedes."""
    chosen = {"critic_warmup_updates": 0, "lr_warmup_updates": 0}
    paper = {"preset": "paper", "advantage": "running_mean"}
    settings = LearningSettings.model_validate(chosen if whole else chosen | paper)
    with tempfile.TemporaryDirectory() as home:
        zero = write_version_zero("benchmark", UUID(int=1), base, settings, Path(home))
        model = LoraModel(base, dtype, settings, Path(zero.path))
    optimisers = build_optimisers(model, settings)

    def step() -> float:
        started = time.perf_counter()
        result = run_update(model, optimisers, trajectories, settings, updates_done=1, shortfall=1.0)
        return time.perf_counter() - started if whole else result.seconds["policy"]

    return step


def batch(rollouts: int, prompt: int, turns: list[tuple[int, int]], common: int = 0) -> list[Trajectory]:
    """Random tokens. common: how many of a prompt's tokens all rollouts share. turns: (action, observation) tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1000, 40000, (count,), generator=generator)

    shared = tokens(common)
    trajectories = []
    for number in range(rollouts):
        parts, positions, length = [shared, tokens(prompt - common)], [], prompt
        for actions, observations in turns:
            positions += range(length, length + actions)
            parts.append(tokens(actions + observations))
            length += actions + observations
        rewards = torch.zeros(len(positions))
        rewards[-1] = float(number % 2)
        reward_counts = torch.zeros(len(positions), dtype=torch.int64)
        reward_counts[-1] = 1
        trajectories.append(
            Trajectory(
                rollout_id=UUID(int=number),
                segment=0,
                token_ids=torch.cat(parts),
                action_positions=torch.tensor(positions),
                behaviour_logprobs=torch.full((len(positions),), -10.8),  # random tokens: about log(1 / 49152)
                rewards=rewards,
                reward_counts=reward_counts,
                temperatures=torch.ones(len(positions)),
                staleness=torch.zeros(len(positions), dtype=torch.int64),
                interaction_index=torch.zeros(len(positions), dtype=torch.int64),
                rollout_action_tokens=len(positions),
                rollout_return=float(rewards.sum()),
            )
        )
    return trajectories


if __name__ == "__main__":
    main()
