"""The learning alone, without a server: an environment's three phases in one synchronous loop (`--help` says how).

Each update samples 32 rollouts with the weights of `--lag` updates ago (a running server's are one or two behind),
trains on them, and writes one CSV row. Any learning setting can be changed: `--set anchor_coefficient=0.02`. The base
model is the one that EVERGREEN_MODEL names.
"""

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings
from app.settings import get_settings
from benchmarks.tickets_batch import load_tokenizer, render, sample, trajectory
from envs.environment import Environment, Episode
from envs.tickets import Tickets
from envs.writing import Writing
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.prepare import ensure_base_model, write_version_zero
from learner.shortfall import reward_shortfall
from learner.step import run_update

COLUMNS = (
    "update", "phase", "reward", "reward_64", "reward_256", "ev_before", "ev_after", "entropy", "base_kl",
    "masked", "policy_grad", "value_grad", "advantage_std", "action_tokens", "sample_s", "update_s",
)  # fmt: skip

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"tickets": Tickets, "writing": Writing}
"""Those whose rollouts are one turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", choices=ENVIRONMENTS, default="tickets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="per phase")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=200, help="episodes of the greedy measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--out", type=Path, required=True, help="CSV file; the summary lands beside it as .json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # as the learn worker does
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.set)}
    learning = LearningSettings(**changes)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        summary = Run(arguments, learning, csv.DictWriter(file, COLUMNS), file.flush).play()
    summary = {"seed": arguments.seed, "lag": arguments.lag, "changes": changes} | summary
    arguments.out.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary), flush=True)


class Run:
    def __init__(self, arguments: argparse.Namespace, learning: LearningSettings, rows: Any, flush: Any) -> None:
        self.arguments, self.learning, self.rows, self.flush = arguments, learning, rows, flush
        base = ensure_base_model(get_settings())
        with tempfile.TemporaryDirectory() as home:
            zero = write_version_zero("benchmark", UUID(int=1), base, learning, Path(home))
            self.model = LoraModel(base, resolve_dtype(get_settings().dtype, base), learning, Path(zero.path))
        self.optimisers = build_optimisers(self.model, learning)
        self.per_prompt = learning.group_size if learning.advantage == "group" else 1
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(base)
        self.environment = ENVIRONMENTS[arguments.env](arguments.seed, phases=arguments.phases)
        self.generator = torch.Generator().manual_seed(arguments.seed)
        self.older: deque[list[Tensor]] = deque(maxlen=arguments.lag + 1)

    def play(self) -> dict[str, object]:
        batch = self.learning.rollouts_per_update
        phases = []
        done = rollouts = 0
        rewards: list[float] = []
        self.rows.writeheader()
        for phase in range(1, self.arguments.phases + 1):
            rewards_of_phase: list[float] = []
            for _ in range(self.arguments.updates):
                start = time.perf_counter()
                self.older.append([p.detach().clone() for p in self.model.policy_parameters.values()])
                episodes = [self.environment.reset((rollouts + i) // self.per_prompt, phase) for i in range(batch)]
                trajectories, scores = self._sample(episodes, self.older[0], rollouts)
                sampled = time.perf_counter()
                shortfall = reward_shortfall(scores, [1] * len(scores), -1.0, 1.0)  # the default policy's range
                result = run_update(self.model, self.optimisers, trajectories, self.learning, done, shortfall, rewards)
                ended = time.perf_counter()
                rewards_of_phase += scores
                rewards += scores
                rollouts += batch
                self._write(done, phase, rewards, scores, result.health, sampled - start, ended - sampled)
                done += 1
            phases.append(
                {
                    "last_256": statistics.mean(rewards_of_phase[-256:]),
                    "updates_to_0.8": self._recovery(rewards_of_phase),
                    "greedy_held_out": self._held_out(phase),
                }
            )
            print(json.dumps({"phase": phase, **phases[-1]}), flush=True)
        return {"phases": phases}

    def _sample(self, episodes: Sequence[Episode], weights: list[Tensor], first: int) -> tuple[list[Any], list[float]]:
        prompts = [render(self.tokenizer, episode.messages) for episode in episodes]
        parameters = list(self.model.policy_parameters.values())
        newest = [p.detach().clone() for p in parameters]
        self._load(weights)
        answers = self._answers(prompts, self.generator)
        self._load(newest)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in answers]
        scores = [episode.judge(text) for episode, text in zip(episodes, texts, strict=True)]
        staleness = len(self.older) - 1
        trajectories = []
        for i, (prompt, answer, score) in enumerate(zip(prompts, answers, scores, strict=True)):
            one = trajectory(first + i, prompt, answer, score)
            group = str((first + i) // self.per_prompt)
            trajectories.append(replace(one, staleness=torch.full_like(one.staleness, staleness), group=group))
        return trajectories, scores

    def _answers(
        self, prompts: Sequence[list[int]], generator: torch.Generator | None
    ) -> list[tuple[list[int], list[float]]]:
        most = self.environment.sampling.max_tokens
        return sample(self.model, prompts, self.tokenizer.eos_token_id, generator, most)

    def _load(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.model.policy_parameters.values(), weights, strict=True):
                parameter.copy_(weight)

    def _held_out(self, phase: int) -> float | None:
        """Mean reward of the newest weights at temperature 0, of held-out episodes."""
        episodes = self.environment.held_out(phase)[: self.arguments.held_out]
        scores: list[float] = []
        for start in range(0, len(episodes), 40):
            part = episodes[start : start + 40]
            prompts = [render(self.tokenizer, episode.messages) for episode in part]
            answers = self._answers(prompts, None)
            for episode, (ids, _) in zip(part, answers, strict=True):
                scores.append(episode.judge(self.tokenizer.decode(ids, skip_special_tokens=True)))
        return statistics.mean(scores) if scores else None

    def _recovery(self, rewards: Sequence[float]) -> float | None:
        """Updates from the phase's start until the moving mean of 64 rewards reaches 0.8; None: never."""
        for end in range(64, len(rewards) + 1):
            if sum(rewards[end - 64 : end]) >= 0.8 * 64:
                return end / self.learning.rollouts_per_update
        return None

    def _write(
        self,
        update: int,
        phase: int,
        rewards: Sequence[float],
        scores: Sequence[float],
        health: dict[str, Any],
        sample_s: float,
        update_s: float,
    ) -> None:
        masked = [low + high for low, high in zip(health["masked_low"], health["masked_high"], strict=True)]
        row = {
            "update": update,
            "phase": phase,
            "reward": statistics.mean(scores),
            "reward_64": statistics.mean(rewards[-64:]),
            "reward_256": statistics.mean(rewards[-256:]),
            "masked": statistics.mean(masked),
            "policy_grad": statistics.mean(health["policy_grad_norms"]) if health["policy_grad_norms"] else None,
            "value_grad": statistics.mean(health["value_grad_norms"]) if health["value_grad_norms"] else None,
            "sample_s": sample_s,
            "update_s": update_s,
        }
        row |= {name: health[name] for name in ("ev_before", "ev_after", "entropy", "base_kl", "advantage_std")}
        row["action_tokens"] = health["action_tokens"]
        self.rows.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
        self.flush()


if __name__ == "__main__":
    main()
