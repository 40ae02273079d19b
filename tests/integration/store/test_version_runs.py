"""Completions whose weights were swapped under them: which version sampled which token, as it is stored and claimed."""

import pytest

from app.db.repositories.policies import lock_policy
from app.db.repositories.rollouts import sampled
from app.db.repositories.versions import get_version
from app.feedback.views import interaction_view
from tests.integration.store.world import SMALL, World, version_row


@pytest.fixture
def names(world: World) -> list[str]:
    """Labels of versions 0 to 3; the head is 3."""
    found = ["p-v0"]
    for _ in range(3):
        number = world.new_version()
        with world.database.read() as session:
            row = get_version(session, world.policy_id, number)
            assert row is not None
            found.append(row.adapter_name)
    return found


def test_each_token_is_the_version_that_the_engine_said(world: World, names: list[str]) -> None:
    spanning = world.begin("chat", version=2)
    labelled = ((names[2], 3), (names[3], 2))
    world.complete(spanning.interaction_id, [1, 2, 3, 4, 5], version=2, labelled=labelled)
    row = world.interaction(spanning.interaction_id)
    assert (row.version, row.version_runs, row.reason) == (2, [[2, 3], [3, 2]], None)
    assert interaction_view(row, [])["version_runs"] == [
        {"version": 2, "tokens": 3},
        {"version": 3, "tokens": 2},
    ]
    with world.database.read() as session:
        what = sampled(session, [spanning.rollout_id])[spanning.rollout_id]
    assert (what.interactions, what.versions, what.completion_tokens) == (1, (2, 3), 5)

    world.feedback(1.0, rollout="chat")
    world.rewarded(version=3)
    claim = world.batch()
    (claimed,) = next(r for r in claim.rollouts if r.id == spanning.rollout_id).interactions
    assert claimed.staleness == 1
    assert claimed.token_staleness.tolist() == [1, 1, 1, 0, 0]


def test_one_version_needs_no_runs(world: World, names: list[str]) -> None:
    """It waited in the engine's queue while the weights were swapped: sent to 2, sampled by 3."""
    queued = world.begin("chat", version=2)
    world.complete(queued.interaction_id, [1, 2, 3], version=2, labelled=((names[3], 1), (names[3], 2)))
    row = world.interaction(queued.interaction_id)
    assert (row.version, row.version_runs) == (3, None)
    assert interaction_view(row, [])["version_runs"] == [{"version": 3, "tokens": 3}]


def test_weights_that_came_and_went(world: World, names: list[str]) -> None:
    """A version failed its canary, and the one before it was put back."""
    spanning = world.begin("chat", version=2)
    labelled = ((names[2], 1), (names[3], 1), (names[2], 2))
    world.complete(spanning.interaction_id, [1, 2, 3, 4], version=2, labelled=labelled)
    assert world.interaction(spanning.interaction_id).version_runs == [[2, 1], [3, 1], [2, 2]]
    world.feedback(1.0, rollout="chat")
    world.rewarded(version=3)
    (claimed,) = next(r for r in world.batch().rollouts if r.id == spanning.rollout_id).interactions
    assert claimed.token_staleness.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "labelled", [(), (("default", 3),), (("p-v0", 2),), (("p-v0", 2), ("default", 1)), (("p-v0", 4),)]
)
def test_what_nobody_can_name_is_not_trained(world: World, labelled: tuple[tuple[str, int], ...]) -> None:
    begun = world.begin("chat")
    world.complete(begun.interaction_id, [1, 2, 3], labelled=labelled)
    row = world.interaction(begun.interaction_id)
    assert (row.reason, row.version, row.version_runs) == ("unknown_weights", 0, None)
    assert interaction_view(row, [])["version_runs"] == []
    world.feedback(1.0, rollout="chat")
    assert world.state(begun.rollout_id) == ("skipped", "unknown_weights")


def test_one_token_of_a_version_that_was_rolled_back_is_enough(world: World, names: list[str]) -> None:
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        session.add(version_row(policy, 4, 3, "rolled_back"))
        session.add(version_row(policy, 5, 3))
        session.flush()
        labels = {number: get_version(session, policy.id, number) for number in (3, 4, 5)}
        policy.head = 5
    runs = [(3, 2), (4, 1), (3, 2)], [(3, 1), (5, 4)]
    lost, kept = (world.begin(f"chat-{i}", version=3) for i in range(2))
    for begun, of in zip((lost, kept), runs, strict=True):
        labelled = tuple((row.adapter_name, n) for number, n in of if (row := labels[number]) is not None)
        world.complete(begun.interaction_id, [1, 2, 3, 4, 5], version=3, labelled=labelled)
        world.feedback(1.0, rollout=begun.rollout_id)
    world.rewarded(version=5)
    assert {rollout.id for rollout in world.batch().rollouts} >= {kept.rollout_id}
    assert world.state(lost.rollout_id) == ("skipped", "off_lineage")
    assert world.state(kept.rollout_id) == ("training", None)


def test_an_environment_error_outweighs_what_several_versions_sampled(world: World, names: list[str]) -> None:
    begun = [world.begin(f"chat-{i}", version=2) for i in range(2)]
    for spanning in begun:
        labelled = ((names[2], 2), (names[3], 1))
        world.complete(spanning.interaction_id, [1, 2, 3], version=2, labelled=labelled)
    open_, ready = begun
    world.feedback(1.0, rollout=ready.rollout_id)
    assert world.state(ready.rollout_id) == ("ready", None)
    for spanning in begun:
        answer = world.feedback(rollout=spanning.rollout_id, outcome="environment_error")
        assert answer["rollout"] == {"state": "skipped", "reason": "environment_error"}
        assert world.interaction(spanning.interaction_id).version_runs == [[2, 2], [3, 1]]
    late = world.feedback(1.0, rollout=open_.rollout_id)
    assert (late["status"], late["rollout"]["reason"]) == ("late", "environment_error")
    assert world.idle_reason().startswith("too_few_rollouts")


def test_an_adapter_samples_all_of_a_completion(world: World) -> None:
    begun = world.call("chat", completion=[1, 2])
    row = world.interaction(begun.interaction_id)
    assert (row.version, row.version_runs) == (0, None)
    assert interaction_view(row, [])["version_runs"] == [{"version": 0, "tokens": 2}]


def test_a_rollout_is_as_old_as_its_oldest_token(world: World, names: list[str]) -> None:
    assert SMALL.max_staleness == 2
    spanning = world.begin("chat", version=0)
    world.complete(spanning.interaction_id, [1, 2], version=0, labelled=((names[0], 1), (names[3], 1)))
    world.feedback(1.0, rollout="chat")
    assert world.idle_reason().startswith("too_few_rollouts")
    for _ in range(2):
        world.rewarded(version=3)
    assert spanning.rollout_id not in {rollout.id for rollout in world.batch().rollouts}
    assert world.state(spanning.rollout_id) == ("skipped", "stale")
