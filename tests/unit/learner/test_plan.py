"""Which trajectories share a prefix, and which rows run together."""

import pytest
import torch

from learner.plan import PREFIX_PASS_COST, plan_batch
from tests.unit.learner.batches import random_trajectory, two_prefix_batch


def test_two_groups_are_found_and_the_stranger_runs_alone() -> None:
    batch = two_prefix_batch()
    plan = plan_batch(batch, 4096)
    assert sorted(g.prefix_ids.numel() for g in plan.groups) == [0, 40, 60]
    rows = {g.prefix_ids.numel(): sum(m.rows.padded.shape[0] for m in g.micro_batches) for g in plan.groups}
    assert rows == {0: 1, 40: 4, 60: 4}


@pytest.mark.parametrize("budget", [1, 20, 64, 4096])
@pytest.mark.parametrize("share", [True, False])
def test_every_action_token_is_predicted_once_from_all_that_came_before_it(budget: int, share: bool) -> None:
    batch = two_prefix_batch()
    plan = plan_batch(batch, budget, share_prefixes=share)
    flat = [(t, int(p)) for t in batch for p in t.action_positions]
    seen: list[int] = []
    for group in plan.groups:
        prefix = group.prefix_ids
        for micro_batch in group.micro_batches:
            rows, _ = micro_batch.rows.padded.shape
            assert rows == 1 or micro_batch.token_ids.numel() <= budget
            row_of = micro_batch.rows.unpadded // micro_batch.rows.padded.shape[1]
            for state, place in zip(micro_batch.states, micro_batch.index, strict=True):
                trajectory, position = flat[int(place)]
                column = int(micro_batch.positions[state]) - prefix.numel()
                row = micro_batch.rows.padded[row_of[state]]
                assert row[column] == state
                fed = torch.cat([prefix, micro_batch.token_ids[row[: column + 1]]])
                assert torch.equal(fed, trajectory.token_ids[:position])  # all before the action token, nothing else
                seen.append(int(place))
    assert sorted(seen) == list(range(len(flat))) == list(range(plan.token_count))
    assert plan.action_ids.tolist() == [int(t.token_ids[p]) for t, p in flat]


def test_packing_and_padding_are_inverse() -> None:
    for group in plan_batch(two_prefix_batch(), 4096).groups:
        for micro_batch in group.micro_batches:
            packed = torch.arange(micro_batch.token_ids.numel())
            rows = micro_batch.rows
            assert torch.equal(packed[rows.padded].flatten()[rows.unpadded], packed)
            assert set(rows.padded.flatten().tolist()) == set(packed.tolist())


def test_the_prefix_ends_before_the_state_that_predicts_the_first_action_token() -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = list(range(3, 63))
    batch = [random_trajectory(i, prompt, [(2, 0)], generator) for i in range(4)]  # the whole prompt is common
    (group,) = plan_batch(batch, 4096).groups
    assert group.prefix_ids.tolist() == prompt[:-1]


def test_a_group_of_one_and_a_short_prefix_have_no_pass_of_their_own() -> None:
    generator = torch.Generator().manual_seed(2)
    alone = plan_batch([random_trajectory(0, list(range(3, 90)), [(2, 0)], generator)], 4096)
    assert [g.prefix_ids.numel() for g in alone.groups] == [0]
    short = list(range(3, 3 + PREFIX_PASS_COST - 4))
    pair = [random_trajectory(i, [*short, 80 + i, 70], [(2, 0)], generator) for i in range(2)]
    assert [g.prefix_ids.numel() for g in plan_batch(pair, 4096).groups] == [0]
    assert len(plan_batch(pair, 4096).groups[0].micro_batches) == 1


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        plan_batch([], 4096)
