"""Rewards that are revised, or come when their rollout is claimed, trained or skipped."""

from sqlalchemy import select

from app.db.models import Feedback
from app.db.repositories.policies import lock_policy
from app.policies.learning import LearningSettings
from app.rollouts.learning import fail_update
from app.rollouts.lifecycle import close_rollout
from app.rollouts.states import SkipReason
from tests.integration.store.world import World


def test_a_revised_reward_counts_until_the_claim(world: World) -> None:
    rollout = world.rewarded(1.0)
    assert world.feedback(-1.0, rollout=rollout)["rollout"]["state"] == "ready"
    world.rewarded()
    claim = world.batch()
    assert {r.id: r.total_return for r in claim.rollouts}[rollout] == -1.0


def test_a_reward_during_training_is_late_and_one_after_it_too(world: World) -> None:
    rollout = world.rewarded(1.0)
    world.rewarded()
    claim = world.batch()
    during = world.feedback(0.0, rollout=rollout)
    assert (during["status"], during["rollout"]["state"]) == ("late", "training")
    assert "only if the running update fails" in during["message"]
    world.commit(claim)
    after = world.feedback(0.5, rollout=rollout)
    assert (after["status"], after["rollout"]["state"]) == ("late", "trained")
    assert "changes nothing" in after["message"]
    assert world.rollout(rollout).total_return == 1.0


def test_a_late_reward_counts_after_all_if_the_update_fails(world: World) -> None:
    rollout, failed = world.rewarded(1.0), world.rewarded(1.0)
    claim = world.batch()
    world.feedback(0.25, rollout=rollout)
    world.feedback(0.5, rollout=rollout)
    world.feedback(rollout=failed, outcome="environment_error")
    with world.database.write() as session:
        fail_update(session, claim.update_id, "learner", "out of memory")
    assert [status for _, status in world.feedback_statuses()] == [
        "superseded",
        "applied",
        "superseded",
        "applied",
        "applied",
    ]
    assert world.rollout(rollout).total_return == 0.5
    assert world.state(rollout) == ("ready", None)
    assert world.state(failed) == ("skipped", "environment_error")


def test_a_missing_reward_can_come_within_the_staleness_limit(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    world.new_version()
    world.new_version()
    assert world.feedback(rollout=begun.rollout_id, comment="wait")["rollout"]["state"] == "skipped"
    answer = world.feedback(1.0, rollout=begun.rollout_id)
    assert (answer["status"], answer["rollout"]["state"]) == ("applied", "ready")


def test_a_missing_reward_that_comes_too_late_changes_nothing(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    for _ in range(3):
        world.new_version()
    answer = world.feedback(1.0, rollout=begun.rollout_id)
    assert (answer["status"], answer["rollout"]["state"]) == ("late", "skipped")
    assert "older than max_staleness" in answer["message"]


def test_without_a_staleness_limit_no_reward_comes_too_late(world: World) -> None:
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        settings = LearningSettings.model_validate(policy.settings).model_copy(update={"max_staleness": None})
        policy.settings = settings.model_dump(mode="json")
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    for _ in range(5):
        world.new_version()
    assert world.feedback(1.0, rollout=begun.rollout_id)["rollout"]["state"] == "ready"


def test_a_skipped_rollout_tells_why_its_reward_is_late(world: World) -> None:
    begun = world.call(untrainable=SkipReason.OPTED_OUT)
    world.feedback(1.0, rollout=begun.rollout_id)
    answer = world.feedback(1.0, rollout=begun.rollout_id)
    assert answer["status"] == "late"
    assert "asked not to be trained" in answer["message"]


def test_after_a_failed_update_the_newest_reward_counts_though_an_older_one_came_late(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    for _ in range(3):
        world.new_version()
    assert world.feedback(0.25, rollout=begun.rollout_id)["status"] == "late"
    with world.database.write() as session:
        policy = lock_policy(session, world.policy_id)
        policy.settings = {**policy.settings, "max_staleness": None}
    assert world.feedback(0.75, rollout=begun.rollout_id)["status"] == "applied"
    world.rewarded(version=3)
    claim = world.batch()
    with world.database.write() as session:
        fail_update(session, claim.update_id, "learner", "it broke")
    assert world.rollout(begun.rollout_id).total_return == 0.75
    with world.database.read() as session:
        rows = session.scalars(select(Feedback).where(Feedback.rollout_id == begun.rollout_id).order_by(Feedback.id))
        assert [(row.value, row.status) for row in rows] == [(0.25, "superseded"), (0.75, "applied")]


def test_settings_of_another_release_do_not_refuse_a_reward(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
        policy = lock_policy(session, world.policy_id)
        policy.settings = {**policy.settings, "renamed_since": 1}
    assert world.feedback(1.0, rollout=begun.rollout_id)["rollout"]["state"] == "ready"
