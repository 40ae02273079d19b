"""The memory that one update takes where all weights are trained: `python -m benchmarks.full_update`.

A process of its own loads the policy, its float32 masters, the critic and the frozen base, and makes one update with
the online defaults of `training: full`. Beside the peak it prints what the table of docs/learning.md counts per
parameter, which leaves out activations and what Python and torch take before anything is loaded.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from uuid import UUID

import torch

from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings
from app.settings import Settings, get_settings
from benchmarks.policy_step import SHAPES, batch, memory_mib
from learner.full_model import FullModel
from learner.optimisers import build_optimisers
from learner.prepare import ensure_base_model, write_version_zero
from learner.step import run_update

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="128/32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "auto"), default=get_settings().dtype)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--no-anchor", action="store_true", help="no frozen base: anchor_coefficient 0")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the learn worker does
    chosen = {
        "critic_warmup_updates": 0,
        "lr_warmup_updates": 0,
        "gradient_checkpointing": arguments.gradient_checkpointing,
    }
    if arguments.no_anchor:
        chosen["anchor_coefficient"] = 0.0
    settings = LearningSettings.model_validate(chosen, context={"training": "full"})
    base = ensure_base_model(Settings(home=get_settings().home, dtype=arguments.dtype))
    dtype = resolve_dtype(arguments.dtype, base)

    gc.collect()
    before = memory_mib("VmRSS")
    with tempfile.TemporaryDirectory() as home:
        zero = write_version_zero("benchmark", UUID(int=1), base, settings, Path(home), "full", dtype)
        model = FullModel(base, dtype, settings, Path(zero.path))
    optimisers = build_optimisers(model, settings)
    policy = sum(parameter.numel() for parameter in model.policy_parameters.values())
    critic = sum(parameter.numel() for parameter in model.value_parameters.values())
    gc.collect()
    loaded = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc_pid_clear_refs(5))
    started = time.perf_counter()
    run_update(model, optimisers, batch(**SHAPES[arguments.shape]), settings, updates_done=1, shortfall=1.0)
    seconds = time.perf_counter() - started

    base_bytes = 0 if arguments.no_anchor else (2 if dtype == "bfloat16" else 4)
    per_parameter = (20, 12) if dtype == "bfloat16" else (20, 8)
    counted = (per_parameter[0] + base_bytes) * policy + per_parameter[1] * critic
    print(
        json.dumps(
            {
                "shape": arguments.shape,
                "dtype": dtype,
                "threads": arguments.threads,
                "gradient_checkpointing": arguments.gradient_checkpointing,
                "anchor": not arguments.no_anchor,
                "parameters": policy,
                "critic_trains": critic,
                "before_mib": round(before),
                "loaded_mib": round(loaded),
                "peak_mib": round(memory_mib("VmHWM")),
                "counted_mib": round(counted / MIB),
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
