"""How much an update gains from computing the shared prompt prefix once: `python -m benchmarks.prefix_sharing`.

The tickets batch: 32 rollouts, one system prompt and six worked examples in common, answers sampled from the policy.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import torch

from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings
from app.settings import Settings, get_settings
from benchmarks.machine import machine, versions
from benchmarks.tickets_batch import load_tokenizer, render, sample, trajectory
from envs.tickets import Tickets
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.plan import BatchPlan, plan_batch
from learner.prepare import ensure_base_model, write_version_zero
from learner.step import run_update
from learner.trajectory import Trajectory


class Switchable(LoraModel):
    """With `share` off, every trajectory runs whole; all else is the same code."""

    share = True

    def plan(self, trajectories: Sequence[Trajectory], tokens_per_micro_batch: int) -> BatchPlan:
        return plan_batch(trajectories, tokens_per_micro_batch, share_prefixes=self.share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--dtypes", nargs="+", default=[get_settings().dtype])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = [measure(dtype, threads, arguments.runs) for dtype in arguments.dtypes for threads in arguments.threads]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(), "versions": versions(), "results": results}
        arguments.out.write_text(json.dumps(about, indent=2) + "\n")


def measure(dtype: str, threads: int, runs: int) -> dict[str, object]:
    """Medians over `runs` updates with sharing and without, taken in turn, in seconds."""
    torch.set_num_threads(threads)
    learning = LearningSettings(critic_warmup_updates=0)
    base = ensure_base_model(Settings(home=get_settings().home, dtype=dtype))
    with tempfile.TemporaryDirectory() as home:
        zero = write_version_zero("benchmark", UUID(int=1), base, learning, Path(home))
        model = Switchable(base, resolve_dtype(dtype, base), learning, Path(zero.path))
    tokenizer = load_tokenizer(base)
    environment = Tickets(seed=0)
    episodes = [environment.reset(i, 1) for i in range(learning.rollouts_per_update)]
    prompts = [render(tokenizer, episode.messages) for episode in episodes]
    answers = sample(model, prompts, tokenizer.eos_token_id, torch.Generator().manual_seed(0))
    batch = [
        trajectory(i, prompt, answer, episode.judge(tokenizer.decode(answer[0], skip_special_tokens=True)))
        for i, (prompt, answer, episode) in enumerate(zip(prompts, answers, episodes, strict=True))
    ]
    optimisers = build_optimisers(model, learning)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs + 1):
        for share in (True, False):
            model.share = share
            start = time.perf_counter()
            run_update(model, optimisers, batch, learning, updates_done=run, shortfall=1.0)
            if run > 0:  # the first of each kind warms up
                seconds[share].append(time.perf_counter() - start)
    shared, alone = (statistics.median(seconds[share]) for share in (True, False))
    result = {
        "dtype": dtype,
        "threads": threads,
        "rollouts": len(batch),
        "prompt_tokens": statistics.mean(len(p) for p in prompts),
        "action_tokens": sum(len(a[0]) for a in answers),
        "seconds_shared": [round(s, 2) for s in seconds[True]],
        "seconds_unshared": [round(s, 2) for s in seconds[False]],
        "median_shared": round(shared, 2),
        "median_unshared": round(alone, 2),
        "speedup": round(alone / shared, 2),
    }
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
