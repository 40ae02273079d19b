"""Random trajectories with observations in between, for tests of the learner's model and update."""

from uuid import UUID

import torch

from learner.trajectory import Trajectory
from tests.unit.learner.conftest import VOCABULARY


def random_trajectory(
    number: int,
    prompt: list[int],
    turns: list[tuple[int, int]],
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
) -> Trajectory:
    """`turns` are (action tokens, observation tokens after them). The last action token gets a random reward."""
    ids, positions = list(prompt), []
    for actions, observations in turns:
        positions += range(len(ids), len(ids) + actions)
        ids += torch.randint(3, VOCABULARY, (actions + observations,), generator=generator).tolist()
    count = len(positions)
    rewards = torch.zeros(count)
    rewards[-1] = torch.rand((), generator=generator)
    reward_counts = torch.zeros(count, dtype=torch.int64)
    reward_counts[-1] = 1
    return Trajectory(
        rollout_id=UUID(int=number),
        segment=0,
        token_ids=torch.tensor(ids),
        action_positions=torch.tensor(positions),
        behaviour_logprobs=-torch.rand(count, generator=generator) * 3 - 2,
        rewards=rewards,
        reward_counts=reward_counts,
        temperatures=torch.full((count,), temperature),
        staleness=torch.full((count,), number % 3),
        interaction_index=torch.zeros(count, dtype=torch.int64),
        rollout_action_tokens=count,
        rollout_return=float(rewards.sum()),
    )


def two_prefix_batch(seed: int = 0) -> list[Trajectory]:
    """Nine trajectories: two groups with prefixes of 40 and 60 tokens, unequal prompts, one that shares nothing."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    first, second = tokens(40), tokens(60)
    turns = [[(3, 0)], [(1, 4), (2, 0)], [(5, 2)], [(1, 0)], [(2, 3), (2, 3), (1, 1)]]
    batch = [first + tokens(3 + 5 * i) for i in range(4)] + [second + tokens(7 - i) for i in range(4)] + [tokens(9)]
    return [
        random_trajectory(i, prompt, turns[i % 5], generator, temperature=0.7 + 0.1 * i)
        for i, prompt in enumerate(batch)
    ]
