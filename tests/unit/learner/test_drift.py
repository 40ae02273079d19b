"""When a change of the residuals counts as drift."""

import random
from dataclasses import replace

import pytest
import torch
from uuid_utils.compat import uuid7

from learner.advantages import first_residuals
from learner.drift import RESIDUALS_KEPT, Drift, find_drift
from tests.unit.learner.batches import two_prefix_batch


def coin(chance: float, count: int, seed: int) -> list[float]:
    """Rewards of 0 and 1, of which the critic expects the mean."""
    generator = random.Random(seed)
    return [float(generator.random() < chance) - chance for _ in range(count)]


def test_a_fall_is_found_within_its_batch() -> None:
    before, batch = coin(0.9, 256, seed=1), [-0.9] * 32
    drift, kept = find_drift(before, batch, reward_range=1.0)
    assert drift is not None
    assert drift.before == pytest.approx(0.0, abs=0.1)
    assert drift.batch == pytest.approx(-0.9)
    # what lay before the change is forgotten with it
    assert 0 < len(kept) < 32
    assert set(kept) == {-0.9}


@pytest.mark.parametrize("seed", range(20))
def test_chance_is_no_drift(seed: int) -> None:
    drift, kept = find_drift([], coin(0.5, 2000, seed), reward_range=1.0)
    assert drift is None
    assert len(kept) == RESIDUALS_KEPT


def test_each_change_is_found_once() -> None:
    """Two changes in twelve batches, the first within one."""
    residuals = coin(0.9, 168, seed=2) + [-0.9] * 88 + [0.5] * 128
    found: list[int] = []
    kept: list[float] = []
    for i in range(0, len(residuals), 32):
        drift, kept = find_drift(kept, residuals[i : i + 32], reward_range=1.0)
        if drift is not None:
            found.append(i // 32)
    assert found == [5, 8]


def test_rewards_of_another_range_drift_alike() -> None:
    before, batch = coin(0.9, 256, seed=1), [-0.9] * 32
    one, kept = find_drift(before, batch, reward_range=1.0)
    ten, ten_kept = find_drift([10 * r for r in before], [10 * r for r in batch], reward_range=10.0)
    assert one is not None
    assert ten is not None
    assert (ten.before, ten.batch) == pytest.approx((10 * one.before, 10 * one.batch))
    assert len(kept) == len(ten_kept)


def test_a_drift_in_words() -> None:
    assert Drift(0.02, -0.63).in_words() == (
        "rewards became less than the critic expects: reward - value is -0.63 on average over this update's rollouts, "
        "and was +0.02 before"
    )


def test_residuals_of_rollouts_by_hand() -> None:
    """Two segments of one rollout, discounted by 1/2, the first with two rewards, and a rollout of one."""
    forked, single = uuid7(), uuid7()
    template = two_prefix_batch()[0]
    trajectories = [
        replace(
            template,
            rollout_id=rollout,
            **dict.fromkeys(("behaviour_logprobs", "temperatures"), torch.ones(len(rewards))),
            **dict.fromkeys(("staleness", "interaction_index"), torch.zeros(len(rewards), dtype=torch.int64)),
            reward_counts=torch.tensor(counts),
            action_positions=torch.arange(3, 3 + len(rewards)),
            rewards=rewards,
        )
        for rollout, rewards, counts in (
            (forked, torch.tensor([0.0, 1.0]), [0, 2]),
            (forked, torch.tensor([0.0, 0.0, 1.0]), [0, 0, 1]),
            (single, torch.tensor([-1.0]), [1]),
        )
    ]
    values = torch.tensor([0.25, 9.0, 0.5, 9.0, 9.0, 0.75])
    # (0.5 * 1 - 0.25) / 2 = 0.125 and 0.25 * 1 - 0.5 = -0.25; -1 - 0.75
    assert first_residuals(trajectories, values, torch.zeros(3), gamma=0.5) == {forked: -0.0625, single: -1.75}
    # a quarter of 4 lies beyond the first one's cut: (1.5 - 0.25) / 2
    ends = torch.tensor([4.0, 0.0, 0.0])
    assert first_residuals(trajectories, values, ends, gamma=0.5) == {forked: 0.1875, single: -1.75}
