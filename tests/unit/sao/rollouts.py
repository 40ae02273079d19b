"""Claimed rollouts built by name, for tests of what becomes of them."""

from collections.abc import Sequence
from uuid import UUID, uuid5

import numpy as np

from app.rollouts.claimed import ClaimedInteraction, ClaimedRollout
from app.rollouts.states import SkipReason

NAMESPACE = UUID(int=0)


def interaction(
    name: str,
    parent: str | None,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    reward: float | None = None,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    staleness: int = 0,
    skip: SkipReason | None = None,
    staleness_runs: tuple[tuple[int, int], ...] = (),
    finish_reason: str = "stop",
) -> ClaimedInteraction:
    return ClaimedInteraction(
        id=uuid5(NAMESPACE, name),
        parent_id=uuid5(NAMESPACE, parent) if parent else None,
        version=0,
        staleness=staleness,
        new_prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=np.array([-0.5] * len(completion) if logprobs is None else logprobs, dtype=np.float32),
        temperature=temperature,
        finish_reason=finish_reason,
        reward=reward,
        skip_reason=skip,
        staleness_runs=staleness_runs,
    )


def rollout(*interactions: ClaimedInteraction, final: float | None = None) -> ClaimedRollout:
    return ClaimedRollout(id=uuid5(NAMESPACE, "rollout"), interactions=interactions, final_reward=final)
