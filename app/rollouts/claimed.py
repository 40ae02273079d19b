"""What a claim hands to the learner: plain data, detached from any session."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np
import numpy.typing as npt

from app.policies.learning import Training
from app.rollouts.states import SkipReason

Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ClaimedInteraction:
    """One request and its completion. `reward` is its turn reward at the claim."""

    id: UUID
    parent_id: UUID | None
    version: int
    """Number of the policy version that sampled the completion; of the oldest, where several did."""
    staleness: int
    """Policy steps on the parent chain from that version to the head of the claim."""
    new_prompt_ids: Tokens
    """Prompt tokens after the parent's last token; for a root, the whole prompt."""
    completion_ids: Tokens
    logprobs: Logprobs
    """Behaviour log-probs (natural log, at `temperature`), one per completion token."""
    temperature: float
    finish_reason: str
    reward: float | None
    """None: it was given none of its own."""
    skip_reason: SkipReason | None
    """Not None: context only, none of its tokens is trained."""
    staleness_runs: tuple[tuple[int, int], ...] = ()
    """((staleness, tokens), ...) in the order of the tokens, where several versions sampled it; empty: all alike."""

    @property
    def token_staleness(self) -> npt.NDArray[np.int64]:
        """(n,) int64: policy steps from the version that sampled each completion token to the head of the claim."""
        runs = self.staleness_runs or ((self.staleness, len(self.completion_ids)),)
        return np.repeat([steps for steps, _ in runs], [tokens for _, tokens in runs])


@dataclass(frozen=True)
class ClaimedRollout:
    """Interactions come in order of their start; a parent precedes its children."""

    id: UUID
    interactions: tuple[ClaimedInteraction, ...]
    final_reward: float | None
    """The rollout's own reward, without its turns'; None: it has none."""
    group: str | None = None
    """Rollouts of one prompt have the same one (app/rollouts/groups.py); None: it is of no group."""

    @property
    def total_return(self) -> float:
        # a replay compares it with what an earlier release has recorded: to the last bit, in this order of adding
        return (self.final_reward or 0.0) + sum(i.reward or 0.0 for i in self.interactions)

    @property
    def reward_count(self) -> int:
        """How many rewards its return is the sum of, at least 1: each lies in the policy's declared range."""
        return max(1, len(self.rewards))

    @property
    def rewards(self) -> dict[str, float]:
        """Target (the rollout's own id, or an interaction's) -> the reward that counts there."""
        given = [(self.id, self.final_reward), *((i.id, i.reward) for i in self.interactions)]
        return {str(target): reward for target, reward in given if reward is not None}

    def with_rewards(self, rewards: Mapping[str, float]) -> "ClaimedRollout":
        """The same rollout as it would be with these rewards (of any targets, its own among them) and no others."""
        interactions = tuple(replace(i, reward=rewards.get(str(i.id))) for i in self.interactions)
        return replace(self, interactions=interactions, final_reward=rewards.get(str(self.id)))


@dataclass(frozen=True)
class VersionRef:
    number: int
    path: str
    sha256: str
    adapter_name: str


@dataclass(frozen=True)
class Claim:
    update_id: UUID
    policy_id: UUID
    policy_name: str
    base_model: str
    settings: dict[str, object]
    """LearningSettings as JSON."""
    head: VersionRef
    checkpoint_update_id: UUID | None
    """The last done update, whose checkpoint is the learner's state; None before the first."""
    updates_done: int
    reward_min: float
    reward_max: float
    """With reward_min, the policy's declared range of a reward."""
    rollouts: tuple[ClaimedRollout, ...] = field(repr=False)
    training: Training = "lora"
    pretrainings: int = 0
    """How many of `updates_done` were value pretrainings, which count for no warm-up."""
    probes: tuple[tuple[int, ...], ...] | None = None
    """The policy's canary prompts (token ids); None until its first batch fixes them."""
