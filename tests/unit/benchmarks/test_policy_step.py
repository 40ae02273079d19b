"""Both contestants of the policy step get the batch that its shape names."""

import torch

from benchmarks.policy_step import SHAPES, batch


def test_a_batch_by_hand() -> None:
    """Prompts of 10 tokens, 6 of them shared; 2 action tokens, an observation of 3, 1 action token."""
    one, other = batch(rollouts=2, prompt=10, common=6, turns=[(2, 3), (1, 0)])
    for trajectory in (one, other):
        assert trajectory.token_ids.shape == (16,)
        assert trajectory.action_positions.tolist() == [10, 11, 15]
        assert trajectory.rewards_to_come.tolist() == [1, 1, 1]
    assert torch.equal(one.token_ids[:6], other.token_ids[:6])
    assert not (one.token_ids[6:] == other.token_ids[6:]).any()
    assert (one.rollout_return, other.rollout_return) == (0.0, 1.0)


def test_the_shapes_are_those_that_they_are_called() -> None:
    lengths = {name: {t.token_ids.numel() for t in batch(**shape)} for name, shape in SHAPES.items()}
    assert lengths == {
        "128/32": {128 + 32},
        "1024/128 shared": {1024 + 128},
        "2048/32": {2048 + 32},
        "6 turns": {256 + 6 * 32 + 5 * 64},
    }
