"""Reward: what counts, what comes late, and what the caller is told."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import update

from app.db.models import Feedback, Policy
from app.db.repositories.keys import create_key
from app.db.session import Database
from app.errors import ApiError, Conflict, InvalidRequest, NotFound
from app.rollouts.learning import fail_update
from app.rollouts.lifecycle import close_rollout
from tests.integration.store.world import World


def test_the_newest_value_per_target_replaces_the_older(world: World) -> None:
    first = world.call("chat", [1], [2])
    second = world.call("chat", [1, 2, 3], [4])
    world.feedback(0.25, interaction=first.interaction_id)
    world.feedback(0.5, interaction=second.interaction_id)
    world.feedback(-0.25, interaction=first.interaction_id)
    world.feedback(1.0, rollout="chat", final=False)
    assert world.feedback_statuses() == [(0.25, "superseded"), (0.5, "applied"), (-0.25, "applied"), (1.0, "applied")]
    assert world.rollout(first.rollout_id).total_return == 0.5 - 0.25 + 1.0
    assert world.state(first.rollout_id) == ("open", None)


@pytest.mark.parametrize("by", ["rollout", "interaction"])
def test_a_reward_for_a_single_call_is_final(world: World, by: str) -> None:
    begun = world.call()
    target: dict[str, Any] = {by: getattr(begun, f"{by}_id")}
    assert world.feedback(1.0, **target)["rollout"]["state"] == "ready"


def test_a_turn_of_a_named_rollout_is_not_the_end_of_it(world: World) -> None:
    begun = world.call("chat")
    answer = world.feedback(1.0, interaction=begun.interaction_id)
    assert answer["rollout"]["state"] == "open"
    assert "open until a final reward" in answer["message"]
    assert world.feedback(0.5, interaction=begun.interaction_id, final=True)["rollout"]["state"] == "ready"


def test_a_turn_of_an_unnamed_rollout_with_two_calls_is_not_final(world: World) -> None:
    begun = world.call()
    world.call(str(begun.rollout_id), [7])
    assert world.feedback(1.0, interaction=begun.interaction_id)["rollout"]["state"] == "open"


def test_a_reward_for_a_named_rollout_is_final_unless_it_says_not(world: World) -> None:
    world.call("chat")
    assert world.feedback(1.0, rollout="chat", final=False)["rollout"]["state"] == "open"
    assert world.feedback(1.0, rollout="chat")["rollout"]["state"] == "ready"


def test_other_metrics_and_comments_are_kept_and_end_nothing(world: World) -> None:
    begun = world.call()
    assert world.feedback(400.0, rollout=begun.rollout_id, metric="latency_ms")["rollout"]["state"] == "open"
    assert world.feedback(rollout=begun.rollout_id, comment="nice")["rollout"]["state"] == "open"
    assert world.rollout(begun.rollout_id).total_return is None
    world.feedback(1.0, rollout=begun.rollout_id)
    assert world.feedback(rollout=begun.rollout_id, comment="very")["status"] == "applied"
    assert world.rollout(begun.rollout_id).total_return == 1.0


def test_an_outcome_does_not_take_a_reward_back(world: World) -> None:
    begun = world.call()
    world.feedback(1.0, rollout=begun.rollout_id)
    world.feedback(rollout=begun.rollout_id, outcome="success")
    assert world.rollout(begun.rollout_id).total_return == 1.0


def test_an_environment_error_keeps_the_rollout_out_of_training(world: World) -> None:
    begun = world.call()
    answer = world.feedback(0.0, rollout=begun.rollout_id, outcome="environment_error")
    assert answer["rollout"] == {"state": "skipped", "reason": "environment_error"}
    assert "its environment failed" in answer["message"]
    ready = world.rewarded()
    world.feedback(rollout=ready, outcome="environment_error")
    assert world.state(ready) == ("skipped", "environment_error")
    # and that is final
    assert world.feedback(1.0, rollout=ready)["status"] == "late"
    assert world.state(ready) == ("skipped", "environment_error")


def test_an_environment_error_after_a_close_without_reward_is_not_forgotten(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    assert world.state(begun.rollout_id) == ("skipped", "no_reward")
    answer = world.feedback(rollout=begun.rollout_id, outcome="environment_error")
    assert answer["status"] == "applied"
    assert answer["rollout"] == {"state": "skipped", "reason": "environment_error"}
    assert "its environment failed" in answer["message"]
    late = world.feedback(1.0, rollout=begun.rollout_id)
    assert (late["status"], late["rollout"]["reason"]) == ("late", "environment_error")
    assert "its environment failed" in late["message"]


def test_a_late_environment_error_from_before_counts_when_a_reward_comes(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        close_rollout(session, world.rollout(begun.rollout_id))
    world.feedback(rollout=begun.rollout_id, outcome="noted")
    with world.database.write() as session:
        session.execute(update(Feedback).values(outcome="environment_error", status="late"))
    late = world.feedback(1.0, rollout=begun.rollout_id)
    assert (late["status"], late["rollout"]["reason"]) == ("late", "environment_error")


def test_a_newer_value_does_not_cancel_an_environment_error(world: World) -> None:
    begun = world.begin("chat")
    world.feedback(0.0, interaction=begun.interaction_id, outcome="environment_error")
    world.feedback(1.0, interaction=begun.interaction_id)
    world.feedback(1.0, rollout="chat")
    world.complete(begun.interaction_id)
    assert world.state(begun.rollout_id) == ("skipped", "environment_error")


def test_a_newer_value_does_not_cancel_an_environment_error_reported_during_training(world: World) -> None:
    rollout, other = world.rewarded(), world.rewarded()
    claim = world.batch()
    world.feedback(0.0, rollout=rollout, outcome="environment_error")
    world.feedback(1.0, rollout=rollout)
    with world.database.write() as session:
        fail_update(session, claim.update_id, "learner", "it broke")
    assert world.state(rollout) == ("skipped", "environment_error")
    assert world.state(other) == ("ready", None)


def test_an_environment_error_waits_for_what_runs(world: World) -> None:
    begun = world.begin("chat")
    assert world.feedback(rollout="chat", outcome="environment_error")["rollout"]["state"] == "open"
    world.complete(begun.interaction_id)
    assert world.state(begun.rollout_id) == ("skipped", "environment_error")


def test_the_same_idempotency_key_and_body_give_the_same_answer(world: World) -> None:
    begun = world.call("chat")
    first = world.feedback(1.0, interaction=begun.interaction_id, idempotency_key="k")
    world.feedback(0.5, rollout="chat")
    assert world.feedback(1.0, interaction=begun.interaction_id, idempotency_key="k") == first
    assert first["rollout"]["state"] == "open"
    assert len(world.feedback_statuses()) == 2
    with pytest.raises(Conflict, match="another body") as caught:
        world.feedback(0.0, interaction=begun.interaction_id, idempotency_key="k", body_sha256="c" * 64)
    assert caught.value.code == "idempotency_key_reused"
    # the key is looked up before the target: this is another body, whether or not its target is there
    with pytest.raises(Conflict) as caught:
        world.feedback(1.0, rollout="no-such", idempotency_key="k", body_sha256="d" * 64)
    assert caught.value.code == "idempotency_key_reused"
    # another key's idempotency keys are its own
    assert world.feedback(0.75, rollout="chat", idempotency_key="k", key=world.judge) != first


@pytest.mark.parametrize("same_rollout", [True, False])
def test_one_idempotency_key_used_at_once_counts_once(
    world: World, open_database: Callable[[], Database], same_rollout: bool
) -> None:
    targets = [world.call().rollout_id]
    targets.append(targets[0] if same_rollout else world.call().rollout_id)
    barrier = threading.Barrier(2)

    def post(number: int, database: Database) -> dict[str, Any] | str:
        caller = world.on(database)
        barrier.wait(timeout=30)
        try:
            body = "b" * 64 if same_rollout else str(number) * 64
            return caller.feedback(1.0, rollout=targets[number], idempotency_key="once", body_sha256=body)
        except Conflict as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(post, range(2), [open_database(), open_database()]))
    assert len(world.feedback_statuses()) == 1
    if same_rollout:
        assert answers[0] == answers[1]
    else:
        assert sum(answer == "idempotency_key_reused" for answer in answers) == 1


@pytest.mark.parametrize(
    ("value", "changes", "code"),
    [
        (float("nan"), {}, "reward_not_finite"),
        (float("inf"), {}, "reward_not_finite"),
        (float("-inf"), {"metric": "quality"}, "reward_not_finite"),
        (1.5, {}, "reward_out_of_range"),
        (-1.001, {}, "reward_out_of_range"),
        (None, {}, "reward_missing"),
    ],
)
def test_unusable_values_are_refused(world: World, value: float | None, changes: dict[str, Any], code: str) -> None:
    begun = world.call()
    with pytest.raises(InvalidRequest) as caught:
        world.feedback(value, rollout=begun.rollout_id, **changes)
    assert caught.value.code == code
    assert world.feedback_statuses() == []


def test_the_range_is_the_policys_own(world: World) -> None:
    with world.database.write() as session:
        session.get_one(Policy, world.policy_id).reward_max = 10.0
    begun = world.call()
    assert world.feedback(10.0, rollout=begun.rollout_id)["status"] == "applied"


def test_targets_must_exist_be_reachable_and_agree(world: World) -> None:
    begun, other = world.call("one"), world.call("two")
    answer = world.feedback(0.5, rollout="one", interaction=begun.interaction_id)
    assert answer["interaction_id"] == str(begun.interaction_id)
    same = begun.rollout_id.hex.upper()
    assert world.feedback(0.5, rollout=same, interaction=begun.interaction_id)["status"] == "applied"
    cases: list[tuple[dict[str, Any], type[ApiError], str]] = [
        ({}, InvalidRequest, "target_missing"),
        ({"rollout": "three"}, NotFound, "rollout_not_found"),
        ({"interaction": other.rollout_id}, NotFound, "interaction_not_found"),
        ({"interaction": "no-uuid"}, NotFound, "interaction_not_found"),
        ({"rollout": "two", "interaction": begun.interaction_id}, InvalidRequest, "target_mismatch"),
    ]
    for target, error, code in cases:
        with pytest.raises(error) as caught:
            world.feedback(1.0, **target)
        assert caught.value.code == code


def test_a_judge_rewards_every_rollout_and_a_stranger_none(world: World) -> None:
    begun = world.call()
    with world.database.write() as session:
        stranger = create_key(session, name="s", scopes=["inference", "feedback"])[0]
    for target in ({"rollout": begun.rollout_id}, {"interaction": begun.interaction_id}):
        with pytest.raises(NotFound):
            world.feedback(1.0, key=stranger, **target)
    assert world.feedback(1.0, interaction=begun.interaction_id, key=world.judge)["status"] == "applied"


def test_a_name_is_the_keys_own_first_and_everyones_only_then(world: World) -> None:
    with world.database.write() as session:
        operator = create_key(session, name="o", scopes=["inference", "feedback", "admin"])[0]
        other = create_key(session, name="x", scopes=["inference"])[0]
    agents, own = world.call("chat").rollout_id, world.call("chat", key=operator).rollout_id
    assert world.feedback(1.0, rollout="chat", key=operator)["rollout_id"] == str(own)
    assert world.state(agents) == ("open", None)
    # a judge has none of its own: it must say which
    with pytest.raises(Conflict) as caught:
        world.feedback(1.0, rollout="chat", key=world.judge)
    assert caught.value.code == "rollout_ambiguous"
    alone = world.call("alone", key=other).rollout_id
    assert world.feedback(1.0, rollout="alone", key=operator)["rollout_id"] == str(alone)
