import pytest

from app.db.repositories.policies import lock_policy
from app.rollouts.lifecycle import close_rollout
from app.rollouts.sweeps import sweep_idle, sweep_orphans, sweep_stale
from tests.integration.store.world import World, version_row


def idle(world: World) -> int:
    with world.database.write() as session:
        return sweep_idle(session, with_reward_s=60, without_reward_s=1800)


@pytest.mark.parametrize(
    ("reward", "idle_s", "state"),
    [
        (0.5, 59, ("open", None)),
        (0.5, 61, ("ready", None)),
        (None, 61, ("open", None)),
        (None, 1799, ("open", None)),
        (None, 1801, ("skipped", "no_reward")),
    ],
)
def test_idle_rollouts_are_closed(
    world: World, reward: float | None, idle_s: float, state: tuple[str, str | None]
) -> None:
    rollout = world.call("chat").rollout_id
    if reward is not None:
        world.feedback(reward, rollout="chat", final=False)
    world.age_rollout(rollout, idle_s)
    assert idle(world) == (state[0] != "open")
    assert world.state(rollout) == state
    assert idle(world) == 0


@pytest.mark.parametrize("what", ["call", "reward"])
def test_idle_counts_from_the_last_call_or_reward(world: World, what: str) -> None:
    rollout = world.call("chat").rollout_id
    world.feedback(0.5, rollout="chat", final=False)
    world.age_rollout(rollout, 61)
    if what == "call":
        world.call("chat", [9])
    else:
        world.feedback(0.75, rollout="chat", final=False)
    assert idle(world) == 0


def test_a_rollout_in_which_something_runs_is_not_idle(world: World) -> None:
    begun = world.begin("chat")
    world.feedback(0.5, rollout="chat", final=False)
    world.age_rollout(begun.rollout_id, 100)
    assert idle(world) == 0
    world.complete(begun.interaction_id)
    world.age_rollout(begun.rollout_id, 100)
    assert idle(world) == 1
    assert world.state(begun.rollout_id) == ("ready", None)


def test_orphans_are_aborted_and_let_their_rollout_go(world: World) -> None:
    dead, alive = world.begin("dead"), world.begin("alive")
    finished = world.call("dead", [7])
    world.feedback(1.0, rollout="dead")
    world.age_rollout(dead.rollout_id, 601)
    world.age_rollout(alive.rollout_id, 599)

    def sweep() -> int:
        with world.database.write() as session:
            return sweep_orphans(session, older_than_s=600)

    assert sweep() == 1
    assert sweep() == 0
    orphan = world.interaction(dead.interaction_id)
    assert (orphan.state, orphan.reason) == ("aborted", "aborted")
    assert "600 s" in (orphan.detail or "")
    assert world.interaction(finished.interaction_id).state == "completed"
    assert world.interaction(alive.interaction_id).state == "running"
    assert world.state(dead.rollout_id) == ("ready", None)


def test_ready_rollouts_that_became_too_old_are_skipped(world: World) -> None:
    old, kept, lost = world.rewarded(version=0), world.rewarded(version=2), world.rewarded(version=3)
    unrewarded = world.call().rollout_id
    with world.database.write() as session:
        close_rollout(session, world.rollout(unrewarded))
        policy = lock_policy(session, world.policy_id)
        session.add(version_row(policy, 1, 0))
        session.add(version_row(policy, 2, 1))
        session.add(version_row(policy, 3, 2, "rolled_back"))
        session.add(version_row(policy, 4, 2))
        policy.head = 4

    def sweep() -> int:
        with world.database.write() as session:
            return sweep_stale(session)

    assert sweep() == 2
    assert sweep() == 0
    assert world.state(old) == ("skipped", "stale")
    assert world.state(lost) == ("skipped", "off_lineage")
    assert world.state(kept) == ("ready", None)
    assert world.state(unrewarded) == ("skipped", "no_reward")


def test_a_turn_that_is_not_trained_makes_no_rollout_stale(world: World) -> None:
    begun = world.begin("chat", version=0)
    world.complete(begun.interaction_id, logprobs=None)
    world.call("chat", [8], version=3)
    world.feedback(1.0, rollout="chat")
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        for number in (1, 2, 3):
            session.add(version_row(policy, number, number - 1))
        policy.head = 3
        assert sweep_stale(session) == 0


def test_settings_of_another_release_do_not_stop_the_sweep(world: World) -> None:
    old = world.rewarded(version=0)
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        policy.settings = {**policy.settings, "renamed_since": 1}
        for number in (1, 2, 3):
            session.add(version_row(policy, number, number - 1))
        policy.head = 3
        assert sweep_stale(session) == 1
    assert world.state(old) == ("skipped", "stale")
