"""How often the base model succeeds before it has learned anything: any environment, plain transformers, T = 1.

    python benchmarks/untrained.py tools --model MODEL_DIRECTORY --samples 96

Prints the success (reward above 0) and the mean reward per phase, and a few rollouts to read.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from envs.environment import Environment, Episode
from envs.tickets import Tickets
from envs.tools import Tools
from envs.writing import Writing

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
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, local_files_only=True).eval()
    environment: Environment = ENVIRONMENTS[arguments.environment](arguments.seed)
    started = time.perf_counter()
    for phase in arguments.phases or range(1, environment.phases + 1):
        rewards: list[float] = []
        turns: list[int] = []
        for first in range(0, arguments.samples, arguments.batch):
            indices = range(first, min(first + arguments.batch, arguments.samples))
            for answers, reward in play(model, tokenizer, environment, [environment.reset(i, phase) for i in indices]):
                if len(rewards) < arguments.show:
                    print(f"  {reward:.2f} {answers}")
                rewards.append(reward)
                turns.append(len(answers))
        success = statistics.mean(reward > 0 for reward in rewards)
        print(
            f"phase {phase}: success {success:.3f}, mean reward {statistics.mean(rewards):.3f}, "
            f"{statistics.mean(turns):.2f} turns, {len(rewards)} rollouts, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


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
