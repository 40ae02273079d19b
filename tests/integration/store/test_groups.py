"""`advantage: group`: whole groups are claimed, and none waits for ever."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from app.db.models import ApiKey
from app.db.repositories.policies import lock_policy
from app.db.repositories.rollouts import lock_rollout
from app.db.session import Database
from app.rollouts.claimed import Claim
from app.rollouts.learning import Idle, fail_update
from app.rollouts.lifecycle import close_rollout
from tests.integration.store.world import World, version_row


@pytest.fixture
def grouped(world: World) -> World:
    """Four rollouts an update, two of a group."""
    world.configure(advantage="group", group_size=2, min_rollouts=2, min_rollouts_after_wait=1)
    return world


def member(world: World, group: Any, value: float | None = 1.0, **changes: Any) -> UUID:
    """A one-call rollout with this tag; value: its reward, None: it stays open."""
    rollout = world.call(tags={"group": group}, **changes).rollout_id
    if value is not None:
        world.feedback(value, rollout=rollout, key=changes.get("key"))
    return rollout


def ids(claim: Claim) -> list[UUID]:
    return [rollout.id for rollout in claim.rollouts]


def test_whole_groups_are_claimed_the_newest_first_and_their_rollouts_together(grouped: World) -> None:
    a1, b1, c1 = (member(grouped, group) for group in "abc")
    assert grouped.idle_reason() == (
        "too_few_rollouts: 0 ready, 2 needed (1 once the oldest has waited 60 s), in groups of 2; 3 more wait for the "
        "rest of their group, 0 have no tag 'group' and are not trained while advantage is group"
    )
    c2, a2, b2 = (member(grouped, group, 0.0) for group in "cab")
    claim = grouped.batch()
    assert ids(claim) == [b2, b1, a2, a1]
    assert [r.group for r in claim.rollouts] == [f"{grouped.key.id}/b"] * 2 + [f"{grouped.key.id}/a"] * 2
    grouped.commit(claim)
    assert ids(grouped.batch()) == [c2, c1]


def test_a_group_that_is_not_whole_is_left_alone(grouped: World) -> None:
    half = member(grouped, "half")
    whole = [member(grouped, "whole") for _ in range(2)]
    claim = grouped.batch()
    assert ids(claim) == whole[::-1]
    assert grouped.state(half) == ("ready", None)


def test_other_settings_take_no_notice_of_the_tag(world: World) -> None:
    rollouts = [member(world, "a"), world.rewarded(), member(world, "b")]
    claim = world.batch()
    assert ids(claim) == rollouts[::-1]
    assert [r.group for r in claim.rollouts] == [f"{world.key.id}/b", None, f"{world.key.id}/a"]


@pytest.mark.parametrize("other", ["skipped", "never asked", "environment error"])
def test_a_group_that_cannot_be_whole_is_trained_without_the_rest(grouped: World, other: str) -> None:
    rest = member(grouped, "g")
    if other == "skipped":
        opened = member(grouped, "g", None)
        grouped.write(lambda session: close_rollout(session, grouped.rollout(opened)))
        assert grouped.state(opened) == ("skipped", "no_reward")
    elif other == "environment error":
        broken = member(grouped, "g", None)
        grouped.feedback(rollout=broken, outcome="environment_error")
        assert grouped.state(broken) == ("skipped", "environment_error")
    grouped.age_rollout(rest, 30)
    assert "1 more wait for the rest of their group" in grouped.idle_reason()
    grouped.age_rollout(rest, 61)
    assert ids(grouped.batch()) == [rest]


def test_a_rollout_of_the_group_that_is_open_is_waited_for(grouped: World) -> None:
    ready = member(grouped, "g")
    late = member(grouped, "g", None)
    grouped.age_rollout(ready, 3600)
    assert "1 more wait" in grouped.idle_reason()
    grouped.feedback(0.5, rollout=late)
    assert sorted(ids(grouped.batch())) == sorted([ready, late])


def test_what_is_too_old_is_skipped_and_the_rest_of_its_group_trained_without_it(grouped: World) -> None:
    old = member(grouped, "g")
    with grouped.database.write() as session:
        policy = lock_policy(session, grouped.policy_id)
        for number in (1, 2, 3):
            session.add(version_row(policy, number, number - 1))
        policy.head = 3
    young = member(grouped, "g", version=3)
    whole = [member(grouped, "h", version=2) for _ in range(2)]
    claim = grouped.batch()
    assert ids(claim) == [*whole[::-1], young]
    assert grouped.state(old) == ("skipped", "stale")


def test_more_than_a_group_are_two_groups_and_the_second_waits_for_its_time(grouped: World) -> None:
    first, second, third = (member(grouped, "g") for _ in range(3))
    claim = grouped.batch()
    assert ids(claim) == [second, first]
    grouped.commit(claim)
    assert "1 more wait" in grouped.idle_reason()
    grouped.age_rollout(third, 61)
    assert ids(grouped.batch()) == [third]


def test_rollouts_without_the_tag_stay_ready_and_are_told_of(grouped: World) -> None:
    plain = [grouped.rewarded(), member(grouped, ""), member(grouped, True)]
    for rollout in plain:
        grouped.age_rollout(rollout, 3600)
    assert "3 have no tag 'group' and are not trained while advantage is group" in grouped.idle_reason()
    assert [grouped.state(rollout) for rollout in plain] == [("ready", None)] * 3
    grouped.configure(advantage="value")
    assert sorted(ids(grouped.batch())) == sorted(plain)


def test_two_keys_with_one_word_are_two_groups(grouped: World) -> None:
    other: ApiKey = grouped.judge
    member(grouped, "g")
    member(grouped, "g", key=other)
    assert "2 more wait" in grouped.idle_reason()
    member(grouped, "g", key=other)
    claim = grouped.batch()
    assert {r.group for r in claim.rollouts} == {f"{other.id}/g"}
    assert len(claim.rollouts) == 2


def test_a_smaller_group_does_not_keep_the_others_out_of_a_batch(grouped: World) -> None:
    """One rollout alone and two pairs make five, a batch has four: the newest pairs that fit are taken."""
    grouped.configure(min_rollouts=4)
    pair = [member(grouped, "pair") for _ in range(2)]
    other = [member(grouped, "other") for _ in range(2)]
    alone = member(grouped, "alone")
    grouped.age_rollout(alone, 61)
    assert ids(grouped.batch()) == [*other[::-1], *pair[::-1]]


def test_a_batch_is_full_when_the_next_group_does_not_fit(grouped: World) -> None:
    """The newest is alone, then come pairs: 1 + 2 of at most 4, and the next pair has no room."""
    grouped.configure(min_rollouts=4, max_wait_s=0, min_rollouts_after_wait=4)
    first = [member(grouped, "first") for _ in range(2)]
    second = [member(grouped, "second") for _ in range(2)]
    alone = member(grouped, "alone")
    claim = grouped.batch()
    assert ids(claim) == [alone, *second[::-1]]
    assert [grouped.state(r) for r in first] == [("ready", None)] * 2


def test_a_failed_update_is_tried_again_by_whole_groups_until_one_is_left(world: World) -> None:
    world.configure(advantage="group", group_size=3, rollouts_per_update=9, min_rollouts=9, max_staleness=None)
    rollouts = {group: [member(world, group) for _ in range(3)] for group in "abc"}
    poison = rollouts["b"][1]
    batches: list[list[str]] = []
    while isinstance(outcome := world.claim(), Claim):
        batches.append([str(r.group)[-1] for r in outcome.rollouts])
        if poison in ids(outcome):
            world.fail(outcome)
        else:
            world.commit(outcome)
    assert isinstance(outcome, Idle)
    assert batches[0] == list("cccbbbaaa")
    # nine are cut beside the group in the middle, six between their groups, three within; the poison stands alone
    # three times
    assert sorted(map(len, batches), reverse=True) == [9, 6, 3, 3, 3, 2, 1, 1, 1, 1, 1]
    assert all(len(set(batch)) * 3 == len(batch) for batch in batches if len(batch) >= 3)
    assert world.state(poison) == ("skipped", "update_failed")
    states = [world.state(r) for group in rollouts.values() for r in group if r != poison]
    assert states == [("trained", None)] * 8


def test_rollouts_given_back_without_blame_are_claimed_as_the_group_they_were(grouped: World) -> None:
    group = [member(grouped, "g") for _ in range(2)]
    claim = grouped.batch()
    with grouped.database.write() as session:
        fail_update(session, claim.update_id, "learner", "the disk is full", blame_rollouts=False)
    assert ids(grouped.batch()) == group[::-1]


def test_a_group_of_which_a_rollout_is_being_written_to_is_passed(
    grouped: World, open_database: Callable[[], Database], backend: str
) -> None:
    if backend == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    held = [member(grouped, "held") for _ in range(2)]
    free = [member(grouped, "free") for _ in range(2)]
    with open_database().write() as session:
        lock_rollout(session, held[0])
        claim = grouped.batch()
    assert ids(claim) == free[::-1]
    grouped.commit(claim)
    assert ids(grouped.batch()) == held[::-1]
