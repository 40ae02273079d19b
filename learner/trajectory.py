"""A trajectory: one segment of a rollout as the learner reads it (plain tensors, on the CPU)."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """One path of interactions whose tokens form one exact sequence of L tokens, with T trained action tokens.

    An action token at position p is predicted from the hidden state at p - 1, so p >= 1 always.
    """

    rollout_id: UUID
    segment: int
    """Index of the segment within its rollout."""
    token_ids: Tensor
    """(L,) int64: the whole path, context included."""
    action_positions: Tensor
    """(T,) int64, strictly increasing: positions in token_ids of the action tokens trained here."""
    behaviour_logprobs: Tensor
    """(T,) float32, natural logs at `temperatures`."""
    rewards: Tensor
    """(T,) float32: the reward that arrives with each action token (see learner/batch.py)."""
    reward_counts: Tensor
    """(T,) int64: of how many rewards that is the sum, each within the policy's declared range."""
    temperatures: Tensor
    """(T,) float32 > 0: the temperature each action token was sampled at."""
    staleness: Tensor
    """(T,) int64: policy steps between the sampling version and the head."""
    interaction_index: Tensor
    """(T,) int64: index into the claimed rollout's interactions."""
    rollout_action_tokens: int
    """l of the policy's lambda: trained action tokens of the whole rollout, all segments."""
    rollout_return: float
    """Sum of all rewards of the rollout, whatever segment they arrive in."""
    truncated: bool = False
    """Its last action was cut off at a limit of length: it did not end there by itself."""
    group: str | None = None
    """Rollouts of one prompt share it, for GRPO's advantage; None: the rollout is of no group."""

    @property
    def opening(self) -> Tensor:
        """(T,) bool: which action tokens open an action, that is, follow context."""
        opening = torch.ones(self.action_positions.numel(), dtype=torch.bool)
        opening[1:] = self.action_positions.diff() > 1
        return opening

    @property
    def rewards_to_come(self) -> Tensor:
        """(T,) int64: how many rewards arrive with each action token or a later one."""
        return self.reward_counts.flip(0).cumsum(0).flip(0)

    @property
    def rewards_before(self) -> Tensor:
        """(T,) int64: how many rewards have arrived before each action token."""
        return self.reward_counts.cumsum(0) - self.reward_counts

    def __post_init__(self) -> None:
        count = self.action_positions.numel()
        for name in (
            "behaviour_logprobs",
            "rewards",
            "reward_counts",
            "temperatures",
            "staleness",
            "interaction_index",
        ):
            if getattr(self, name).shape != (count,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, expected ({count},)")
        if count == 0:
            raise ValueError("a trajectory needs at least one action token")
        positions = self.action_positions
        if positions[0] < 1 or positions[-1] >= self.token_ids.numel() or bool((positions.diff() <= 0).any()):
            raise ValueError("action positions must increase strictly within [1, L)")
        if not bool(torch.isfinite(self.behaviour_logprobs).all()):
            raise ValueError("behaviour log-probs must be finite: refuse the sample instead of padding it")


def per_trajectory(flat: Tensor, trajectories: Sequence[Trajectory]) -> tuple[Tensor, ...]:
    """(N, ...) of a batch's action tokens in flat order -> one tensor per trajectory."""
    return flat.split([t.action_positions.numel() for t in trajectories])
