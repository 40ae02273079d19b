"""One token per row: processed log-probs, and a draw that depends on nothing but the row's own generator."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.engine.embedded.sequence import SampledToken, SamplingParams

MIN_TEMPERATURE = 1e-2
"""Lower ones are raised to it, as in vLLM; below 1e-5 sampling is greedy."""
_GREEDY_BELOW = 1e-5
_LEAST_NOISE = 2.0**-40
"""Smaller draws are raised to it: p / 0 would win whatever p is. Only tokens less likely than this notice."""


def sample(
    logits: Tensor, rows: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> list[SampledToken | None]:
    """logits (R, V) float32 -> a token per row; None where the model produced no finite log-prob.

    The log-probs reported are those of the distribution sampled from: log_softmax(logits / T), after top-k and top-p
    if the row asks for them. Greedy rows report T = 1.
    """
    greedy = [row.temperature < _GREEDY_BELOW for row in rows]
    temperatures = [1.0 if g else max(row.temperature, MIN_TEMPERATURE) for g, row in zip(greedy, rows, strict=True)]
    scaled = logits / torch.tensor(temperatures)[:, None]
    for index, row in enumerate(rows):
        if not greedy[index] and (row.top_k > 0 or row.top_p < 1.0):
            scaled[index] = _truncate(scaled[index], row.top_k, row.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = _draw(logprobs, greedy, generators)
    values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    top_ids, top_values = _top(logprobs, rows)
    return [
        SampledToken(token, value, dict(zip(ids[:count], tops[:count], strict=True))) if math.isfinite(value) else None
        for token, value, ids, tops, count in zip(
            chosen.tolist(), values, top_ids, top_values, [row.top_logprobs for row in rows], strict=True
        )
    ]


def _draw(logprobs: Tensor, greedy: Sequence[bool], generators: Sequence[np.random.Generator]) -> Tensor:
    """(R,) int64. The exponential race argmax(p / e), e ~ Exp(1), draws token i with probability p_i.

    Unlike inverting the cumulative distribution, it rarely changes its mind when p changes in the last digits, which
    it does with the size of the batch.
    """
    chosen = logprobs.argmax(dim=-1)
    for index, generator in enumerate(generators):
        if not greedy[index]:
            # in double precision: a single-precision draw is exactly 0 once in six million, often enough for a
            # vocabulary of 50,000 to notice
            noise = np.maximum(generator.standard_exponential(logprobs.shape[1]), _LEAST_NOISE)
            chosen[index] = (logprobs[index].exp() / torch.from_numpy(noise)).argmax()
    return chosen


def _truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """(V,) -> (V,): -inf outside the top k, then outside the smallest set of probability top_p."""
    kept = min(top_k, logits.numel()) if top_k > 0 else logits.numel()
    values, indices = logits.topk(kept)
    if top_p < 1.0:
        probabilities = values.softmax(dim=-1)
        # a token stays while the mass before it is below top_p; the first always does
        before = probabilities.cumsum(dim=-1) - probabilities
        values = values.masked_fill(before >= top_p, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(0, indices, values)


def _top(logprobs: Tensor, rows: Sequence[SamplingParams]) -> tuple[list[list[int]], list[list[float]]]:
    most = max(row.top_logprobs for row in rows)
    if most == 0:
        return [[] for _ in rows], [[] for _ in rows]
    values, indices = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    return indices.tolist(), values.tolist()
