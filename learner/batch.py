"""Claimed rollouts -> trajectories: which tokens are trained in which segment, and which reward arrives where."""

import math
from collections.abc import Sequence
from itertools import pairwise
from uuid import UUID

import numpy as np
import torch

from app.rollouts.claimed import ClaimedInteraction, ClaimedRollout
from app.rollouts.segments import segments
from learner.trajectory import Trajectory


def build_trajectories(rollouts: Sequence[ClaimedRollout]) -> list[Trajectory]:
    """One trajectory per segment that trains something, rollout after rollout.

    An action token is trained in the first path (`app.rollouts.segments`) that holds its interaction and is context in
    the others. Untrainable interactions (`skip_reason` set) are context for what continues them; one that nothing
    trained continues is left out, so that an aborted call beside its retry does not split the rollout.

    **Where rewards arrive.** Time within a rollout is the order in which its interactions started. In a segment,

    - the reward of an interaction arrives on the last action token of the newest interaction that this segment trains
      and that did not start later: on its own last action token if it is trained here, else (it lies on another branch
      or behind a compaction, or is untrainable) on the last trained action token before it;
    - a reward from before the segment's first trained interaction does not arrive at all: no token of this segment can
      have caused it;
    - the rollout's final reward arrives on the segment's last trained action token.

    So a segment's last action token receives every later reward of the rollout and the final one, and with gamma =
    lambda = 1 the return of a trained token is the rewards of its own interaction and of all that started later, plus
    the final reward, whichever branch they lie on. Each segment has its own copy; nothing is bootstrapped from one to
    another. gamma counts trained action tokens within the segment only: what lies between two segments costs no time.
    The reward of an untrainable interaction that no trained one precedes trains nothing; it stays in the rollout's
    return, which is a figure of its own.

    Raises:
        ValueError: naming the rollout, if it has no trained action token, if ids and log-probs of a trained
            interaction differ in number, or if a log-prob, temperature or reward is not usable. Nothing is padded.
    """
    return [trajectory for rollout in rollouts for trajectory in _trajectories(rollout)]


def _trajectories(rollout: ClaimedRollout) -> list[Trajectory]:
    try:
        _check(rollout)
        paths = _paths_to_train(rollout)
        if not paths:
            raise ValueError("no trained action token, so it should have been skipped(no_action_tokens)")
        trained_by_path = _first_path(rollout, paths)
        count = sum(len(rollout.interactions[i].completion_ids) for trained in trained_by_path for i in trained)
        return [
            _trajectory(rollout, segment, path, trained, count)
            for segment, (path, trained) in enumerate(zip(paths, trained_by_path, strict=True))
        ]
    except ValueError as error:
        raise ValueError(f"rollout {rollout.id} cannot be trained: {error}") from error


def _paths_to_train(rollout: ClaimedRollout) -> list[list[int]]:
    """The segments of the tree without the interactions that no trained one continues: each ends on a trained one."""
    needed: set[UUID | None] = set()
    for interaction in reversed(rollout.interactions):
        if _has_action_tokens(interaction) or interaction.id in needed:
            needed.update((interaction.id, interaction.parent_id))
    kept = [i for i, interaction in enumerate(rollout.interactions) if interaction.id in needed]
    return [[kept[i] for i in path] for path in segments([rollout.interactions[i] for i in kept])]


def _first_path(rollout: ClaimedRollout, paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per path, the interactions whose action tokens are trained in it: each in the first path that holds it."""
    taken: set[int] = set()
    trained_by_path: list[list[int]] = []
    for path in paths:
        trained_by_path.append([i for i in path if i not in taken and _has_action_tokens(rollout.interactions[i])])
        taken.update(path)
    return trained_by_path


def _trajectory(
    rollout: ClaimedRollout, segment: int, path: Sequence[int], trained: Sequence[int], rollout_action_tokens: int
) -> Trajectory:
    pieces: list[np.ndarray] = []
    starts: dict[int, int] = {}
    length = 0
    for i in path:
        interaction = rollout.interactions[i]
        starts[i] = length + len(interaction.new_prompt_ids)
        pieces += [interaction.new_prompt_ids, interaction.completion_ids]
        length = starts[i] + len(interaction.completion_ids)

    sizes = [len(rollout.interactions[i].completion_ids) for i in trained]
    arriving = _rewards_on_last_tokens(rollout, trained)
    rewards, reward_counts = np.zeros(sum(sizes), dtype=np.float64), np.zeros(sum(sizes), dtype=np.int64)
    rewards[np.cumsum(sizes) - 1] = [math.fsum(rewards) for rewards in arriving]
    reward_counts[np.cumsum(sizes) - 1] = [len(rewards) for rewards in arriving]

    def per_token(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(np.repeat(values, sizes), dtype=dtype)

    interactions = [rollout.interactions[i] for i in trained]
    positions = [np.arange(size) + starts[i] for i, size in zip(trained, sizes, strict=True)]
    return Trajectory(
        rollout_id=rollout.id,
        segment=segment,
        token_ids=torch.tensor(np.concatenate(pieces), dtype=torch.int64),
        action_positions=torch.tensor(np.concatenate(positions), dtype=torch.int64),
        behaviour_logprobs=torch.tensor(np.concatenate([i.logprobs for i in interactions]), dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        reward_counts=torch.tensor(reward_counts),
        temperatures=per_token([i.temperature for i in interactions], torch.float32),
        staleness=torch.tensor(np.concatenate([i.token_staleness for i in interactions]), dtype=torch.int64),
        interaction_index=per_token(trained, torch.int64),
        rollout_action_tokens=rollout_action_tokens,
        rollout_return=rollout.total_return,
        truncated=rollout.interactions[path[-1]].finish_reason == "length",
        group=rollout.group,
    )


def _rewards_on_last_tokens(rollout: ClaimedRollout, trained: Sequence[int]) -> list[list[float]]:
    """Per trained interaction of one segment, the rewards on its last action token (see `build_trajectories`)."""
    boundaries = [*trained, len(rollout.interactions)]
    rewards = [[i.reward for i in rollout.interactions[start:end]] for start, end in pairwise(boundaries)]
    rewards[-1].append(rollout.final_reward)
    return [[reward for reward in arriving if reward is not None] for arriving in rewards]


def _has_action_tokens(interaction: ClaimedInteraction) -> bool:
    return interaction.skip_reason is None and len(interaction.completion_ids) > 0


def _check(rollout: ClaimedRollout) -> None:
    """ValueError for what would train something wrong. Untrainable interactions need no log-probs."""
    if rollout.final_reward is not None and not math.isfinite(rollout.final_reward):
        raise ValueError(f"its final reward is {rollout.final_reward}")
    for interaction in rollout.interactions:
        where = f"interaction {interaction.id}"
        if interaction.reward is not None and not math.isfinite(interaction.reward):
            raise ValueError(f"{where} has the reward {interaction.reward}")
        if not _has_action_tokens(interaction):
            continue
        if len(interaction.logprobs) != len(interaction.completion_ids):
            raise ValueError(
                f"{where} has {len(interaction.completion_ids)} completion ids "
                f"and {len(interaction.logprobs)} log-probs; they are not padded"
            )
        if not np.isfinite(interaction.logprobs).all():
            raise ValueError(f"{where} has a log-prob that is not finite")
        if not (math.isfinite(interaction.temperature) and interaction.temperature > 0):
            raise ValueError(f"{where} was sampled at temperature {interaction.temperature}")
        if interaction.parent_id is None and len(interaction.new_prompt_ids) == 0:
            raise ValueError(f"{where} has an empty prompt: its first action token has no state before it")
