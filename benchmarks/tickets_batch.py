"""A tickets batch as the learner sees it: real prompts, and answers sampled from the policy itself."""

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

from envs.environment import Message
from learner.lora_model import LoraModel
from learner.trajectory import Trajectory

MAX_TOKENS = 6


def load_tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(base_model, local_files_only=True)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def sample(
    model: LoraModel,
    prompts: Sequence[list[int]],
    eos: int,
    generator: torch.Generator | None,
    max_tokens: int = MAX_TOKENS,
) -> list[tuple[list[int], list[float]]]:
    """Per prompt (ids, log-probs) of an answer of at most `max_tokens` at T = 1; greedy without a generator.

    The prompts' common prefix is computed once; what follows it is left-padded.
    """
    common = 0
    while all(len(p) > common + 1 and p[common] == prompts[0][common] for p in prompts):
        common += 1
    width = max(len(p) for p in prompts) - common
    mask = torch.ones(len(prompts), common + width, dtype=torch.int64)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padding = width - (len(prompt) - common)
        ids[row, padding:] = torch.tensor(prompt[common:])
        mask[row, common : common + padding] = 0

    language_model = model.peft.get_base_model()
    decoder, head = language_model.get_decoder(), language_model.get_output_embeddings()
    model.peft.set_adapter("policy")
    packed, language_model.config._attn_implementation = language_model.config._attn_implementation, "sdpa"
    with torch.autocast("cpu", language_model.dtype, enabled=language_model.dtype != torch.float32):
        cache = DynamicCache(config=language_model.config)
        if common:
            decoder(input_ids=torch.tensor([prompts[0][:common]]), cache=cache, use_cache=True)
            cache.batch_repeat_interleave(len(prompts))
        answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, common:]
        running = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(max_tokens):
            states = decoder(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
            ).last_hidden_state[:, -1]
            logprobs = head(states).float().log_softmax(-1)
            tokens = _choose(logprobs, generator)
            for row in running.nonzero().flatten().tolist():
                answers[row][0].append(int(tokens[row]))
                answers[row][1].append(float(logprobs[row, tokens[row]]))
            running &= tokens != eos
            if not running.any():
                break
            ids, positions = tokens.unsqueeze(1), positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    language_model.config._attn_implementation = packed
    return answers


def _choose(logprobs: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return logprobs.argmax(-1)
    return torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)


def trajectory(number: int, prompt: list[int], answer: tuple[list[int], list[float]], reward: float) -> Trajectory:
    ids, logprobs = answer
    count = len(ids)
    rewards = torch.zeros(count)
    rewards[-1] = reward
    reward_counts = torch.zeros(count, dtype=torch.int64)
    reward_counts[-1] = 1
    return Trajectory(
        rollout_id=UUID(int=number),
        segment=0,
        token_ids=torch.tensor(prompt + ids),
        action_positions=torch.arange(len(prompt), len(prompt) + count),
        behaviour_logprobs=torch.tensor(logprobs),
        rewards=rewards,
        reward_counts=reward_counts,
        temperatures=torch.ones(count),
        staleness=torch.zeros(count, dtype=torch.int64),
        interaction_index=torch.zeros(count, dtype=torch.int64),
        rollout_action_tokens=count,
        rollout_return=reward,
    )
