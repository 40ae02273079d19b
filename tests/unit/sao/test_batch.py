"""Which token is trained where, and which reward arrives on it: worked out by hand for every shape of a rollout.

Tokens are numbered so that they name themselves: 10x are prompts, 1 to 9 actions.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.rollouts.claimed import ClaimedRollout
from app.rollouts.states import SkipReason
from learner.batch import build_trajectories
from learner.sao.advantages import gae
from learner.sao.value import lambda_returns
from learner.trajectory import Trajectory
from tests.unit.sao.rollouts import interaction, rollout


def returns(trajectory: Trajectory) -> list[float]:
    """What the critic is taught with gamma = lambda = 1: per action token the sum of the rewards still to come."""
    zeros = torch.zeros_like(trajectory.rewards)
    return [round(x, 5) for x in lambda_returns(trajectory.rewards, zeros, 1.0, 1.0).tolist()]


def trained_ids(trajectory: Trajectory) -> list[int]:
    return trajectory.token_ids[trajectory.action_positions].tolist()


def test_one_call() -> None:
    (t,) = build_trajectories(
        [
            rollout(
                interaction(
                    "a", None, [101, 102], [1, 2, 3], logprobs=[-0.1, -0.2, -0.3], temperature=0.7, staleness=2
                ),
                final=1.0,
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 102, 1, 2, 3]
    assert t.action_positions.tolist() == [2, 3, 4]
    assert t.behaviour_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert t.rewards.tolist() == [0.0, 0.0, 1.0]
    assert t.temperatures.tolist() == pytest.approx([0.7] * 3)
    assert t.staleness.tolist() == [2, 2, 2]
    assert t.interaction_index.tolist() == [0, 0, 0]
    assert (t.segment, t.rollout_action_tokens) == (0, 3)
    assert {t.token_ids.dtype, t.action_positions.dtype, t.staleness.dtype, t.interaction_index.dtype} == {torch.int64}
    assert {t.behaviour_logprobs.dtype, t.rewards.dtype, t.temperatures.dtype} == {torch.float32}


@pytest.mark.parametrize(("first", "last", "truncated"), [("stop", "length", True), ("length", "stop", False)])
def test_what_is_cut_off_is_what_ends_on_a_cut(first: str, last: str, truncated: bool) -> None:
    """An answer that was cut off and gone on from is none: the rollout went on."""
    one = interaction("a", None, [101], [1], finish_reason=first)
    two = interaction("b", "a", [102], [2], finish_reason=last)
    assert [t.truncated for t in build_trajectories([rollout(one, two)])] == [truncated]


def test_two_turns() -> None:
    """101 1 2 | 102 103 3: turn rewards 0.5 on token 2 and 0.25 on token 3, final 1 on token 3.

    With V = 0.2, 0.4, 0.1, gamma 1, lambda 0.5:
      3: delta = 1.25 - 0.1 = 1.15            A = 1.15
      2: delta = 0.5 + 0.1 - 0.4 = 0.2        A = 0.2 + 0.5 * 1.15 = 0.775
      1: delta = 0.4 - 0.2 = 0.2              A = 0.2 + 0.5 * 0.775 = 0.5875
    """
    (t,) = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1, 2], reward=0.5),
                interaction("b", "a", [102, 103], [3], reward=0.25),
                final=1.0,
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 1, 2, 102, 103, 3]
    assert t.action_positions.tolist() == [1, 2, 5]
    assert t.rewards.tolist() == [0.0, 0.5, 1.25]
    assert t.reward_counts.tolist() == [0, 1, 2]
    assert t.rewards_to_come.tolist() == [3, 3, 2]
    assert t.rewards_before.tolist() == [0, 0, 1]
    assert t.interaction_index.tolist() == [0, 0, 1]
    assert returns(t) == [1.75, 1.75, 1.25]
    advantages = gae(t.rewards, torch.tensor([0.2, 0.4, 0.1]), 1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([0.5875, 0.775, 1.15]))


def test_one_fork() -> None:
    """a -> b, then a -> c: rewards 0.1, 0.2, 0.4, final 1.

    Segment 0 (a b): a and b are trained; c is later than b, so token 2 receives 0.2 + 0.4 + 1 = 1.6.
    Segment 1 (a c): a is context, only c is trained: token 3 receives 0.4 + 1 = 1.4. l = 3 in both.
    Returns: a 0.1 + 0.2 + 0.4 + 1 = 1.7, b 1.6, c 1.4. With V = 0.5 on all, gamma 1, lambda 0.5:
      2: A = 1.6 - 0.5 = 1.1;  1: delta = 0.1 + 0.5 - 0.5 = 0.1, A = 0.1 + 0.55 = 0.65;  3: A = 1.4 - 0.5 = 0.9
    """
    first, second = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1], reward=0.1),
                interaction("b", "a", [102], [2], reward=0.2),
                interaction("c", "a", [103], [3], reward=0.4),
                final=1.0,
            )
        ]
    )
    assert first.token_ids.tolist() == [101, 1, 102, 2]
    assert second.token_ids.tolist() == [101, 1, 103, 3]
    assert (trained_ids(first), trained_ids(second)) == ([1, 2], [3])
    assert first.rewards.tolist() == pytest.approx([0.1, 1.6])
    assert second.rewards.tolist() == pytest.approx([1.4])
    assert (returns(first), returns(second)) == ([1.7, 1.6], [1.4])
    assert (first.segment, second.segment) == (0, 1)
    assert (first.rollout_action_tokens, second.rollout_action_tokens) == (3, 3)
    half = torch.tensor([0.5, 0.5])
    torch.testing.assert_close(gae(first.rewards, half, 1.0, 0.5), torch.tensor([0.65, 1.1]))
    torch.testing.assert_close(gae(second.rewards, half[:1], 1.0, 0.5), torch.tensor([0.9]))


def test_one_compaction() -> None:
    """a -> b, then the context is compacted and c -> d start from a new root: rewards 0.1, 0.2, 0.3, 0.4, final 1.

    Segment 0 (a b): token 2 receives 0.2 + (0.3 + 0.4) + 1 = 1.9. Segment 1 (c d): token 3 receives 0.3, token 4
    0.4 + 1 = 1.4. Returns: a 2.0, b 1.9, c 1.7, d 1.4. No bootstrap: with V = 0.6 on all, gamma 1, lambda 0:
      1: 0.1 + 0.6 - 0.6 = 0.1;  2: 1.9 - 0.6 = 1.3 (not + V of c);  3: 0.3 + 0.6 - 0.6 = 0.3;  4: 1.4 - 0.6 = 0.8
    """
    first, second = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1], reward=0.1),
                interaction("b", "a", [102], [2], reward=0.2),
                interaction("c", None, [109, 108], [3], reward=0.3),
                interaction("d", "c", [107], [4], reward=0.4),
                final=1.0,
            )
        ]
    )
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([101, 1, 102, 2], [109, 108, 3, 107, 4])
    assert first.rewards.tolist() == pytest.approx([0.1, 1.9])
    assert second.rewards.tolist() == pytest.approx([0.3, 1.4])
    assert (returns(first), returns(second)) == ([2.0, 1.9], [1.7, 1.4])
    values = torch.tensor([0.6, 0.6])
    torch.testing.assert_close(gae(first.rewards, values, 1.0, 0.0), torch.tensor([0.1, 1.3]))
    torch.testing.assert_close(gae(second.rewards, values, 1.0, 0.0), torch.tensor([0.3, 0.8]))
    assert (first.rollout_action_tokens, second.rollout_action_tokens) == (4, 4)


def test_branches_that_take_turns() -> None:
    """Started in the order a, b (on a), c (on a), d (on b), e (on c); rewards 1, 2, 4, 8, 16, final 32.

    Segment 0 (a b d): c started after b and before d, so its 4 arrives on b; e's 16 on d. a 1, b 2 + 4, d 8 + 16 + 32.
    Segment 1 (a c e) trains c and e: d's 8 arrives on c. c 4 + 8, e 16 + 32; a's and b's lie before c.
    """
    first, second = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1], reward=1),
                interaction("b", "a", [102], [2], reward=2),
                interaction("c", "a", [103], [3], reward=4),
                interaction("d", "b", [104], [4], reward=8),
                interaction("e", "c", [105], [5], reward=16),
                final=32,
            )
        ]
    )
    assert (trained_ids(first), trained_ids(second)) == ([1, 2, 4], [3, 5])
    assert first.rewards.tolist() == [1, 6, 56]
    assert second.rewards.tolist() == [12, 48]
    assert (first.rewards_to_come.tolist(), second.rewards_to_come.tolist()) == ([6, 5, 3], [4, 2])
    assert (returns(first), returns(second)) == ([63, 62, 56], [60, 48])


def test_reward_of_an_untrainable_turn_arrives_on_the_trained_one_before_it() -> None:
    """a, b (top_p, untrainable, 0.5), c: b's tokens are context, its reward teaches a, not c."""
    (t,) = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1, 2], reward=0.25),
                interaction("b", "a", [102], [3], reward=0.5, logprobs=[], skip=SkipReason.OFF_DISTRIBUTION_SAMPLING),
                interaction("c", "b", [103], [4]),
                final=1.0,
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 1, 2, 102, 3, 103, 4]
    assert trained_ids(t) == [1, 2, 4]
    assert t.rewards.tolist() == [0.0, 0.75, 1.0]
    assert t.rollout_action_tokens == 3


def test_reward_before_anything_trained_teaches_nothing_and_stays_in_the_return() -> None:
    claimed = rollout(
        interaction("a", None, [101], [1], reward=0.5, skip=SkipReason.OPTED_OUT),
        interaction("b", "a", [102], [2]),
        final=1.0,
    )
    (t,) = build_trajectories([claimed])
    assert t.rewards.tolist() == [1.0]
    assert claimed.total_return == 1.5


def test_trailing_untrainable_turn_keeps_no_reward_from_the_last_action_token() -> None:
    """b ends the rollout untrained; its reward and the final one arrive on a's last token, and its tokens are cut."""
    (t,) = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1, 2]),
                interaction("b", "a", [102], [3], reward=0.5, logprobs=[], skip=SkipReason.MISSING_LOGPROBS),
                final=1.0,
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 1, 2]
    assert t.rewards.tolist() == [0.0, 1.5]


def test_an_aborted_call_does_not_split_the_rollout() -> None:
    """a, b (aborted), its retry c on a, d on c: one segment a c d, one trajectory."""
    (t,) = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1]),
                interaction("b", "a", [102], [9], logprobs=[], skip=SkipReason.ABORTED),
                interaction("c", "a", [102], [2]),
                interaction("d", "c", [103], [3]),
                final=1.0,
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 1, 102, 2, 103, 3]
    assert t.interaction_index.tolist() == [0, 2, 3]


def test_an_empty_completion_has_no_action_token() -> None:
    (t,) = build_trajectories(
        [
            rollout(
                interaction("a", None, [101], [1], reward=0.25),
                interaction("b", "a", [102], [], reward=0.5),
                interaction("c", "b", [103], [2]),
            )
        ]
    )
    assert t.token_ids.tolist() == [101, 1, 102, 103, 2]
    assert t.rewards.tolist() == [0.75, 0.0]
    assert t.rewards_to_come.tolist() == [2, 0]


def test_several_rollouts_keep_their_order() -> None:
    one = rollout(interaction("a", None, [101], [1]), final=1.0)
    two = rollout(interaction("b", None, [102], [2, 3]), interaction("c", None, [103], [4]), final=-1.0)
    trajectories = build_trajectories([one, two])
    assert [trained_ids(t) for t in trajectories] == [[1], [2, 3], [4]]
    assert [t.rollout_action_tokens for t in trajectories] == [1, 3, 3]


def random_tree(seed: int) -> ClaimedRollout:
    rng = random.Random(seed)
    made = []
    for i in range(rng.randint(1, 9)):
        parent = rng.choice([None, *(str(j) for j in range(i))])
        skip = SkipReason.ABORTED if rng.random() < 0.25 else None
        length = rng.randint(0, 3)
        tokens = [10 * i + k + 1 for k in range(length)]
        made.append(interaction(str(i), parent, [1000 + i], tokens, reward=float(2**i), skip=skip))
    return rollout(*made, final=float(2**20))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, 2**32))
def test_random_trees(seed: int) -> None:
    """Every trainable token once, in its own context, with the rewards that started with or after it as its return."""
    claimed = random_tree(seed)
    trainable = [i for i in claimed.interactions if i.skip_reason is None and len(i.completion_ids)]
    if not trainable:
        with pytest.raises(ValueError, match="no trained action token"):
            build_trajectories([claimed])
        return
    trajectories = build_trajectories([claimed])
    trained = [token for t in trajectories for token in trained_ids(t)]
    assert sorted(trained) == sorted(int(token) for i in trainable for token in i.completion_ids)

    by_id = {i.id: i for i in claimed.interactions}
    for t in trajectories:
        assert t.rollout_action_tokens == len(trained)
        for position, index, future in zip(
            t.action_positions.tolist(), t.interaction_index.tolist(), returns(t), strict=True
        ):
            own = claimed.interactions[index]
            chain = [own]
            while chain[0].parent_id is not None:
                chain.insert(0, by_id[chain[0].parent_id])
            context = np.concatenate([np.concatenate([i.new_prompt_ids, i.completion_ids]) for i in chain])
            assert t.token_ids[: len(context)].tolist() == context.tolist()
            assert len(context) - len(own.completion_ids) <= position < len(context)
            assert future == 2.0**20 + sum(2.0**i for i in range(index, len(claimed.interactions)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"logprobs": np.array([-0.1], dtype=np.float32)}, "2 completion ids and 1 log-probs"),
        ({"logprobs": np.array([], dtype=np.float32)}, "2 completion ids and 0 log-probs"),
        ({"logprobs": np.array([-0.1, -np.inf], dtype=np.float32)}, "not finite"),
        ({"logprobs": np.array([np.nan, -0.1], dtype=np.float32)}, "not finite"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"reward": float("nan")}, "reward nan"),
        ({"new_prompt_ids": np.array([], dtype=np.int32)}, "empty prompt"),
        ({"skip_reason": SkipReason.OPTED_OUT}, "no trained action token"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(broken: dict[str, object], message: str) -> None:
    claimed = rollout(replace(interaction("a", None, [101], [1, 2]), **broken))
    with pytest.raises(ValueError, match=message) as error:
        build_trajectories([claimed])
    assert str(claimed.id) in str(error.value)


def test_a_parent_from_elsewhere_is_refused() -> None:
    claimed = rollout(interaction("b", "a", [101], [1]), interaction("a", None, [102], [2]))
    with pytest.raises(ValueError, match="does not precede"):
        build_trajectories([claimed])


def test_a_final_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="final reward is inf"):
        build_trajectories([rollout(interaction("a", None, [101], [1]), final=float("inf"))])


def test_each_token_is_as_stale_as_the_version_that_sampled_it() -> None:
    """The first call's weights were swapped twice under it; the second was sampled by one version."""
    first = interaction("a", None, [1, 2], [3, 4, 5, 6], staleness=3, staleness_runs=((3, 1), (2, 2), (0, 1)))
    second = interaction("b", "a", [7], [8, 9], staleness=1)
    (trajectory,) = build_trajectories([rollout(first, second)])
    assert trajectory.staleness.tolist() == [3, 2, 2, 0, 1, 1]
    assert trajectory.staleness.dtype == torch.int64
