"""A rollout from its first interaction to the end."""

from tests.integration.store.world import World


def test_one_call_and_its_reward_make_a_ready_rollout(world: World) -> None:
    begun = world.begin(prompt=[1, 2, 3])
    assert world.state(begun.rollout_id) == ("open", None)
    assert world.interaction(begun.interaction_id).state == "running"
    world.complete(begun.interaction_id, [4, 5])
    interaction = world.interaction(begun.interaction_id)
    assert interaction.new_prompt_ids.tolist() == [1, 2, 3]
    assert interaction.completion_ids is not None
    assert interaction.completion_ids.tolist() == [4, 5]
    answer = world.feedback(1.0, interaction=begun.interaction_id)
    assert answer["status"] == "applied"
    assert answer["rollout"] == {"state": "ready", "reason": None}
    assert world.state(begun.rollout_id) == ("ready", None)


def test_two_rollouts_are_claimed_trained_and_make_a_version(world: World) -> None:
    first, second = world.rewarded(1.0), world.rewarded(0.0)
    claim = world.batch()
    assert [r.id for r in claim.rollouts] == [second, first]
    assert [r.total_return for r in claim.rollouts] == [0.0, 1.0]
    assert world.state(first) == ("training", None)
    assert world.commit(claim) == 1
    assert world.state(first) == ("trained", None)
    policy = world.policy()
    assert (policy.head, policy.updates_done, policy.checkpoint_update_id) == (1, 1, claim.update_id)
