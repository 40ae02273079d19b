"""Advantages without a critic: hand-worked numbers, and plain loops on random rollouts."""

import random
from dataclasses import replace
from uuid import uuid5

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.policies.learning import LearningSettings
from app.rollouts.claimed import ClaimedRollout
from learner.advantages import policy_advantages
from learner.batch import build_trajectories
from learner.sao.baselines import RETURNS_KEPT, group_advantages, running_mean_baselines
from learner.trajectory import per_trajectory
from tests.unit.sao import reference
from tests.unit.sao.reference import Token
from tests.unit.sao.rollouts import NAMESPACE, interaction, rollout
from tests.unit.sao.test_against_reference import assert_close, float32_exact, repeatable

MEAN = LearningSettings(advantage="running_mean")
GROUP = LearningSettings(advantage="group")


def named(name: str, claimed: ClaimedRollout, group: str | None = None) -> ClaimedRollout:
    return replace(claimed, id=uuid5(NAMESPACE, name), group=group)


def one_call(name: str, reward: float, group: str | None = None) -> ClaimedRollout:
    return named(name, rollout(interaction(name, None, [101], [1, 2]), final=reward), group)


def test_the_running_mean_is_that_of_the_last_128_before_the_batch() -> None:
    """130 earlier returns: 8, 8, then 64 zeros and 64 ones. The two eights are forgotten: 64 / 128 = 0.5."""
    earlier = [8.0, 8.0] + [0.0] * 64 + [1.0] * 64
    assert RETURNS_KEPT == 128
    assert running_mean_baselines(torch.tensor([1.0, 0.0]), earlier).tolist() == [0.5, 0.5]
    # the batch's own returns change nothing
    assert running_mean_baselines(torch.tensor([100.0, -100.0]), earlier).tolist() == [0.5, 0.5]
    # a window that is not full yet is the mean of what there is
    assert running_mean_baselines(torch.tensor([1.0]), [1.0, 0.0, 0.0, 0.0]).tolist() == [0.25]


def test_the_first_batch_is_compared_with_its_other_rollouts() -> None:
    """1, 0, 5: the others' means are 2.5, 3 and 0.5; one rollout alone is compared with itself."""
    assert running_mean_baselines(torch.tensor([1.0, 0.0, 5.0]), []).tolist() == [2.5, 3.0, 0.5]
    assert running_mean_baselines(torch.tensor([0.7]), []).tolist() == [pytest.approx(0.7)]


def test_two_turns_under_a_running_mean_by_hand() -> None:
    """101 1 2 | 102 3: turn rewards 0.5 and 0.25, final 1; the mean of the earlier returns is 0.75.

    Returns to go 1.75, 1.75, 1.25: advantages 1, 1 and 0.5. With gamma 0.5: 0.25 * 1.25 + 0.5 * 0.5 = 0.5625,
    0.5 + 0.5 * 1.25 = 1.125 and 1.25: minus 0.75, -0.1875, 0.375 and 0.5.
    """
    trajectories = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1, 2], reward=0.5),
                interaction("b", "a", [102], [3], reward=0.25),
                final=1.0,
            )
        ]
    )
    earlier = [0.5, 1.0]
    assert policy_advantages(trajectories, None, MEAN, earlier).tolist() == [1.0, 1.0, 0.5]
    discounted = MEAN.model_copy(update={"gamma": 0.5})
    assert policy_advantages(trajectories, None, discounted, earlier).tolist() == [-0.1875, 0.375, 0.5]


def test_a_rollout_of_several_segments_is_one_return() -> None:
    """A fork makes two segments: its return 3 counts once beside the other rollout's 1, in the first batch 1 and 3."""
    fork = named(
        "fork",
        rollout(
            interaction("a", None, [101], [1]),
            interaction("b", "a", [102], [2]),
            interaction("c", "a", [103], [3]),
            final=3.0,
        ),
        group="g",
    )
    trajectories = build_trajectories([fork, one_call("single", 1.0, "g")])
    assert [t.rollout_return for t in trajectories] == [3.0, 3.0, 1.0]
    assert policy_advantages(trajectories, None, MEAN, []).tolist() == [2.0, 2.0, 2.0, -2.0, -2.0]
    # mean 2, sample std sqrt(2): (3 - 2) / sqrt(2); three returns would have given another mean
    grouped = policy_advantages(trajectories, None, GROUP, [])
    torch.testing.assert_close(grouped, torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]) / 2**0.5, atol=1e-5, rtol=0)


def test_group_advantages_by_hand() -> None:
    """Group 7: 1, 0, 0, 0, mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, std 1/2: 3/2 and -1/2 three times.

    Group 2 ties at 1/3, group 5 is alone: 0. The groups lie mixed in the batch.
    """
    returns = torch.tensor([1.0, 1 / 3, 0.0, 1 / 3, 0.0, 9.0, 1 / 3, 0.0], dtype=torch.float64)
    groups = [7, 2, 7, 2, 7, 5, 2, 7]
    expected = [1.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.0, -0.5]
    actual = group_advantages(returns, groups)
    assert actual.tolist() == pytest.approx(expected, rel=1e-5, abs=0)
    # the population's std would be sqrt(3)/4 and give sqrt(3)
    assert actual[0].item() != pytest.approx(3**0.5, rel=1e-2)


def test_the_epsilon_keeps_returns_that_nearly_tie_small() -> None:
    """Apart by 2e-9: sample std 1.4e-9, so A = 1e-9 / (1.4e-9 + 1e-6) = 1e-3, not 0.7."""
    actual = group_advantages(torch.tensor([1.0, 1.0 + 2e-9], dtype=torch.float64), [0, 0])
    assert actual.tolist() == pytest.approx([-1e-3, 1e-3], rel=2e-3)


def test_groups_are_told_by_name_and_a_rollout_of_none_has_no_advantage() -> None:
    batch = [
        one_call("a", 1.0, "k/x"),
        one_call("b", 0.0, "k/y"),
        one_call("c", 0.0, "k/x"),
        one_call("d", 1.0),
        one_call("e", 0.0),
        one_call("f", 1.0, "k/y"),
    ]
    trajectories = build_trajectories(batch)
    per_rollout = [a[0].item() for a in per_trajectory(policy_advantages(trajectories, None, GROUP, []), trajectories)]
    high = 0.5 / (0.5**0.5 + 1e-6)
    assert per_rollout == pytest.approx([high, -high, -high, 0.0, 0.0, high])


@pytest.mark.parametrize("advantage", ["running_mean", "group"])
def test_whitening_applies_where_it_is_set(advantage: str) -> None:
    trajectories = build_trajectories([one_call(str(i), float(i), "g") for i in range(4)])
    chosen = LearningSettings.model_validate({"advantage": advantage, "whiten_advantages": True})
    whitened = policy_advantages(trajectories, None, chosen, [0.0])
    assert whitened.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whitened.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 group numbers"):
        group_advantages(torch.zeros(3), [0, 1])
    with pytest.raises(ValueError, match="shape"):
        group_advantages(torch.zeros(2, 1), [0, 1])


def claimed_of(tokens: list[Token], name: str, group: str) -> ClaimedRollout:
    """The same rollout as a claim hands it over: a turn of consecutive action tokens is one interaction."""
    turns: list[tuple[int, list[Token]]] = []
    observations = 0
    for previous, token in zip([Token(action=False), *tokens], tokens, strict=False):
        if not token.action:
            observations += 1
        elif previous.action:
            turns[-1][1].append(token)
        else:
            turns.append((observations, [token]))
            observations = 0
    parts = [
        interaction(
            f"{name}{i}",
            f"{name}{i - 1}" if i else None,
            [100] * prompt,
            [1] * len(actions),
            reward=sum(token.reward for token in actions),
        )
        for i, (prompt, actions) in enumerate(turns)
    ]
    return named(name, rollout(*parts), group)


@repeatable
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.floats(-1, 1), min_size=1, max_size=200),
    st.floats(0.5, 1),
)
def test_against_plain_loops(seed: int, groups: list[int], earlier: list[float], gamma: float) -> None:
    rng = random.Random(seed)
    batch = [float32_exact(reference.random_rollout(rng)) for _ in groups]
    trajectories = build_trajectories([claimed_of(t, f"r{i}-", str(groups[i])) for i, t in enumerate(batch)])
    assert len({t.rollout_id for t in trajectories}) == len(batch)

    mean = policy_advantages(trajectories, None, MEAN.model_copy(update={"gamma": gamma}), earlier)
    moved = [merged_rewards(tokens) for tokens in batch]
    assert_close(mean, [a for tokens in moved for a in reference.running_mean_advantages(tokens, earlier, gamma)])

    returns = [sum(token.reward for token in tokens) for tokens in batch]
    grouped = per_trajectory(policy_advantages(trajectories, None, GROUP, earlier), trajectories)
    for actual, expected in zip(grouped, reference.group_advantages(returns, groups), strict=True):
        assert_close(actual, [expected] * actual.numel())


def merged_rewards(tokens: list[Token]) -> list[Token]:
    """Turns of the reference that nothing separates are one interaction, whose reward lies on its last token."""
    result = list(tokens)
    for i in range(len(result) - 1):
        if result[i].action and result[i + 1].action:
            carried = result[i].reward
            result[i] = replace(result[i], reward=0.0)
            result[i + 1] = replace(result[i + 1], reward=result[i + 1].reward + carried)
    return result
