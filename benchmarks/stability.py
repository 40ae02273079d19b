"""Does a thousand asynchronous updates end where it was best? `python -m benchmarks.stability` (`--help` says how).

A random model of less than a million parameters, in process, on a task that changes: a prompt of random tokens ends in
one of three keys, and the answer's first token must be of the key's class (its id modulo 4). Every `--phase` updates
all three classes move. Each rollout was sampled by the weights of 0 to 4 updates ago, drawn at random. One run per arm
and seed; a run that has its result is skipped if it was made with the same settings, and refused if not.
"""

import argparse
import csv
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from app.policies.learning import FORM, LearningSettings
from benchmarks.tickets_batch import sample, trajectory
from evergreen.conditions import OtherConditions, check_conditions
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.prepare import write_version_zero
from learner.shortfall import reward_shortfall
from learner.step import run_update
from learner.trajectory import Trajectory

ARMS: dict[str, dict[str, Any]] = {
    "sao": {},
    "no_dis": {"clip": "none"},
    "group": {"advantage": "group"},
    "paper": {"preset": "paper"},
}
COLUMNS = (
    "update",
    "phase",
    "reward",
    "entropy",
    "base_kl",
    "ev_after",
    "masked",
    "policy_grad",
    "staleness",
    "seconds",
)
EOS, KEYS, NOISE = 2, range(3, 6), range(6, 64)
VOCABULARY, CLASSES, PROMPT_TOKENS, ANSWER_TOKENS = 64, 4, 8, 2
MAX_STALENESS = 4
WINDOW = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--phase", type=int, default=100, help="updates between two changes")
    parser.add_argument("--lr-scale", type=float, default=10.0, help="of both learning rates, in every arm alike")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stability")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing by two
    torch.set_flush_denormal(True)  # as the learn worker does
    arguments.out.mkdir(parents=True, exist_ok=True)
    conditions = {arm: run_conditions(arm, arguments) for arm in arguments.arms}
    runs = [
        (seed, arm, arguments.out / f"{arm}-seed-{seed}.json")
        for seed, arm in itertools.product(arguments.seeds, arguments.arms)
    ]
    try:
        for _, arm, path in runs:  # all of them before hours are spent on one
            if path.is_file():
                there = json.loads(path.read_text())
                check_conditions(
                    path, {name: there[name] for name in conditions[arm] if name in there}, conditions[arm]
                )
    except OtherConditions as error:
        sys.exit(str(error))
    for seed, arm, path in runs:
        if path.is_file():
            continue
        settings = LearningSettings.model_validate(conditions[arm]["settings"])
        with path.with_suffix(".csv").open("w", newline="") as file:
            rewards = Run(seed, settings, arguments.phase, csv.DictWriter(file, COLUMNS)).play(arguments.updates)
        summary = {"arm": arm, "seed": seed} | conditions[arm] | stability(rewards)
        path.write_text(json.dumps(summary, indent=2) + "\n")
        print(json.dumps(summary), flush=True)


def run_conditions(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run of the arm is made with, beside its seed."""
    usual = LearningSettings.model_validate(ARMS[arm])
    # the default rates are those of a model a thousand times as large
    rates = {name: arguments.lr_scale * getattr(usual, name) for name in ("policy_lr", "value_lr")}
    return {
        "updates": arguments.updates,
        "phase": arguments.phase,
        "form": FORM,
        "settings": usual.model_copy(update=rates).model_dump(mode="json"),
    }


def stability(rewards: Sequence[float]) -> dict[str, float]:
    """rewards: mean reward per update. The last window against the best."""
    window = min(WINDOW, len(rewards))
    windows = [statistics.fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]
    return {"last_100": windows[-1], "best_100": max(windows), "share": windows[-1] / max(windows)}


class Run:
    def __init__(self, seed: int, settings: LearningSettings, phase: int, rows: Any) -> None:
        self.settings, self.phase, self.rows = settings, phase, rows
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.classes = list(range(CLASSES))
        """Of the keys, in their order, are the first; all others are wrong."""
        self.per_prompt = settings.group_size if settings.advantage == "group" else 1
        with tempfile.TemporaryDirectory() as home:
            base = Path(home) / "base"
            _write_model(base, seed)
            zero = write_version_zero("benchmark", UUID(int=1), base, settings, Path(home))
            self.model = LoraModel(base, "float32", settings, Path(zero.path))
        self.optimisers = build_optimisers(self.model, settings)
        self.versions: deque[list[Tensor]] = deque(maxlen=MAX_STALENESS + 1)
        """The policy's weights after the newest updates, newest first."""

    def play(self, updates: int) -> list[float]:
        """Mean reward of each update's rollouts."""
        means: list[float] = []
        returns: list[float] = []
        self.rows.writeheader()
        for update in range(updates):
            if update > 0 and update % self.phase == 0:
                self.classes = self.classes[1:] + self.classes[:1]  # every key's class moves
            started = time.perf_counter()
            self.versions.appendleft([p.detach().clone() for p in self.model.policy_parameters.values()])
            batch = self._batch(update)
            rewards = [t.rollout_return for t in batch]
            shortfall = reward_shortfall(rewards, [1] * len(rewards), 0.0, 1.0)
            result = run_update(
                self.model, self.optimisers, batch, self.settings, update, shortfall, returns, (0.0, 1.0)
            )
            means.append(statistics.fmean(rewards))
            returns += rewards
            self._write(update, batch, means[-1], result.health, time.perf_counter() - started)
        return means

    def _batch(self, update: int) -> list[Trajectory]:
        size = self.settings.rollouts_per_update
        keys = [self.random.randrange(len(KEYS)) for _ in range(size // self.per_prompt)]
        prompts = [self._prompt(key) for key in keys for _ in range(self.per_prompt)]
        stale = [self.random.randrange(len(self.versions)) for _ in range(size)]
        batch: list[Trajectory | None] = [None] * size
        newest = self.versions[0]
        for staleness in sorted(set(stale)):
            rows = [i for i in range(size) if stale[i] == staleness]
            self._load(self.versions[staleness])
            sampled = sample(self.model, [prompts[i] for i in rows], EOS, self.generator, ANSWER_TOKENS)
            for i, answer in zip(rows, sampled, strict=True):
                right = answer[0][0] % CLASSES == self.classes[keys[i // self.per_prompt]]
                one = trajectory(update * size + i, prompts[i], answer, float(right))
                batch[i] = replace(
                    one, staleness=torch.full_like(one.staleness, staleness), group=str(i // self.per_prompt)
                )
        self._load(newest)
        return [one for one in batch if one is not None]

    def _prompt(self, key: int) -> list[int]:
        prompt = [self.random.choice(NOISE) for _ in range(PROMPT_TOKENS)]
        prompt[-1] = KEYS[key]
        return prompt

    def _load(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.model.policy_parameters.values(), weights, strict=True):
                parameter.copy_(weight)

    def _write(
        self, update: int, batch: Sequence[Trajectory], reward: float, health: dict[str, Any], seconds: float
    ) -> None:
        masked = [low + high for low, high in zip(health["masked_low"], health["masked_high"], strict=True)]
        row = {
            "update": update,
            "phase": update // self.phase + 1,
            "reward": reward,
            "masked": statistics.fmean(masked),
            "policy_grad": statistics.fmean(health["policy_grad_norms"]) if health["policy_grad_norms"] else None,
            "staleness": statistics.fmean(float(t.staleness[0]) for t in batch),
            "seconds": seconds,
        } | {name: health[name] for name in ("entropy", "base_kl", "ev_after")}
        self.rows.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def _write_model(directory: Path, seed: int) -> None:
    """A random float32 Llama. Its weights are ten times larger than a fresh model's, so that tokens differ for it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main()
