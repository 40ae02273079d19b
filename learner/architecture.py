"""Which models the learner can train: those whose own forward pass it reproduces."""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from learner.attention import PACKED_ATTENTION

TopLogprobs = Callable[[Sequence[Sequence[int]], int], list[list[tuple[int, float]]]]
"""(prompts, k) -> per prompt the k likeliest next tokens and their log-probs."""


def use_packed_attention(model: PreTrainedModel, top_logprobs: TopLogprobs) -> None:
    """Makes `model` attend by `packed_attention`, and compares it, through `top_logprobs`, with what it was before:
    some families scale or cap logits, or attend in other ways.

    Raises:
        ValueError: its log-probs differ, or not all of its layers attend to everything before.
    """
    name, config = type(model).__name__, model.config
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        raise ValueError(f"{name} has layers without full attention; the learner does not support them")
    prompts = [[*range(1, 41), *range(50, 50 + 3 * i)] for i in range(1, 4)]
    config._attn_implementation = "sdpa"
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor([p], device=model.device), use_cache=False).logits[0, -1].float()
            for p in prompts
        ]
    config._attn_implementation = PACKED_ATTENTION
    for logits, top in zip(expected, top_logprobs(prompts, 5), strict=True):
        stock = logits.log_softmax(-1)
        difference = max(abs(stock[token].item() - logprob) for token, logprob in top)
        if difference > 0.5:
            raise ValueError(
                f"{name} computes its logits in a way that the learner does not reproduce "
                f"(log-probs differ by {difference:.2f} nats); it cannot be trained"
            )
