"""How often the base model succeeds before it has learned anything: any environment, plain transformers, T = 1.

    python -m benchmarks.untrained tools --model MODEL_DIRECTORY --samples 96

Prints the success (reward above 0) and the mean reward per phase, and a few rollouts to read. With every reward, the
machine and the versions they are written to benchmarks/results/untrained/ENVIRONMENT-seed-N.json after each phase;
phases that are there are not played again.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.machine import machine, versions
from envs.environment import Environment, Episode
from envs.tickets import Tickets
from envs.tools import Tools
from envs.writing import Writing
from evergreen.conditions import OtherConditions, check_conditions

ENVIRONMENTS = {"tickets": Tickets, "tools": Tools, "writing": Writing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=ENVIRONMENTS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", type=int, nargs="+", help="default: all")
    parser.add_argument("--samples", type=int, default=96, help="rollouts per phase")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--show", type=int, default=4, help="rollouts per phase that are printed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "untrained")
    arguments = parser.parse_args()
    environment: Environment = ENVIRONMENTS[arguments.environment](arguments.seed)
    conditions = {
        "environment": arguments.environment,
        "seed": arguments.seed,
        "model": arguments.model.resolve().name,
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "samples": arguments.samples,
        "batch": arguments.batch,
        "machine": machine(),
        "versions": versions(),
    }
    path = arguments.out / f"{arguments.environment}-seed-{arguments.seed}.json"
    phases: dict[str, dict[str, Any]] = {}
    if path.exists():
        there = json.loads(path.read_text())
        phases = there.pop("phases")
        try:
            check_conditions(path, there, conditions)
        except OtherConditions as error:
            sys.exit(str(error))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, local_files_only=True).eval()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for phase in arguments.phases or range(1, environment.phases + 1):
        if str(phase) in phases:
            continue
        torch.manual_seed(arguments.seed)  # so that a phase does not depend on which ones were played before it
        started = time.perf_counter()
        rollouts: list[tuple[list[str], float]] = []
        for first in range(0, arguments.samples, arguments.batch):
            indices = range(first, min(first + arguments.batch, arguments.samples))
            rollouts += play(model, tokenizer, environment, [environment.reset(i, phase) for i in indices])
        for answers, reward in rollouts[: arguments.show]:
            print(f"  {reward:.2f} {answers}")
        phases[str(phase)] = phase_result(rollouts, time.perf_counter() - started)
        path.write_text(json.dumps(conditions | {"phases": phases}, indent=1) + "\n")
        shown = {name: value for name, value in phases[str(phase)].items() if name not in ("rewards", "turns")}
        print(f"phase {phase}: {json.dumps(shown)}", flush=True)


def phase_result(rollouts: Sequence[tuple[list[str], float]], seconds: float) -> dict[str, Any]:
    """rollouts: answers and reward of each, in the order of their episodes."""
    rewards = [reward for _, reward in rollouts]
    success = statistics.mean(reward > 0 for reward in rewards)
    return {
        "rollouts": len(rewards),
        "success": round(success, 4),
        "success_standard_error": round((success * (1 - success) / len(rewards)) ** 0.5, 4),
        "mean_reward": round(statistics.mean(rewards), 4),
        "seconds": round(seconds, 1),
        "rewards": rewards,
        "turns": [len(answers) for answers, _ in rollouts],
    }


def play(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, environment: Environment, episodes: Sequence[Episode]
) -> list[tuple[list[str], float]]:
    """The answers and the reward of one rollout per episode, played side by side."""
    running: dict[int, Episode] = dict(enumerate(episodes))
    answers: list[list[str]] = [[] for _ in episodes]
    rewards = [0.0 for _ in episodes]
    while running:
        prompts = [render(tokenizer, episode) for episode in running.values()]
        texts = sample(model, tokenizer, prompts, environment.sampling.max_tokens)
        for (row, episode), text in zip(list(running.items()), texts, strict=True):
            answers[row].append(text)
            rewards[row] += episode.judge(text)
            following = episode.after(text)
            if following is None:
                del running[row]
            else:
                running[row] = following
    return list(zip(answers, rewards, strict=True))


def render(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[int]:
    text = tokenizer.apply_chat_template(episode.messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_tokens: int
) -> list[str]:
    """One answer per prompt at T = 1. What all prompts begin with is computed once; the rest is left-padded."""
    common = 0
    while all(len(prompt) > common + 1 and prompt[common] == prompts[0][common] for prompt in prompts):
        common += 1
    rest = max(map(len, prompts)) - common
    ids = torch.zeros(len(prompts), rest, dtype=torch.int64)
    mask = torch.ones(len(prompts), common + rest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padding = rest + common - len(prompt)
        ids[row, padding:] = torch.tensor(prompt[common:])
        mask[row, common : common + padding] = 0
    cache = DynamicCache(config=model.config)
    if common:
        model(input_ids=torch.tensor([prompts[0][:common]]), cache=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(prompts))
    positions = (mask.cumsum(1) - 1)[:, common:]
    sampled: list[Tensor] = []
    running = torch.ones(len(prompts), dtype=torch.bool)
    while running.any() and len(sampled) < max_tokens:
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
        ).logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1)
        ids[~running] = tokenizer.eos_token_id
        sampled.append(ids)
        running &= ids[:, 0] != tokenizer.eos_token_id
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return tokenizer.batch_decode(torch.cat(sampled, dim=1), skip_special_tokens=True)


if __name__ == "__main__":
    main()
