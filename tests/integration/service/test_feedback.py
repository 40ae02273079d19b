"""Rewards over HTTP, and a rollout as its caller sees it."""

import pytest

from tests.integration.service.world import World

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def http(world: World):
    with world.http() as client:
        yield client


def call(http, rollout: str | None = None, **changes) -> dict[str, str]:
    headers = {"X-Rollout-Id": rollout} if rollout else {}
    reply = http.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers)
    assert reply.status_code == 200, reply.text
    return {"rollout": reply.headers["x-rollout-id"], "interaction": reply.headers["x-interaction-id"]}


def test_a_reward_for_a_one_call_rollout_makes_it_ready(http, world: World):
    made = call(http)
    answer = http.post("/v1/feedback", json={"interaction_id": made["interaction"], "reward": 0.5}).json()
    assert answer["rollout_id"] == made["rollout"]
    assert answer["interaction_id"] == made["interaction"]
    assert (answer["status"], answer["rollout"]) == ("applied", {"state": "ready", "reason": None})
    assert "ready" in answer["message"]
    assert world.rollout(made["rollout"]).total_return == 0.5


def test_a_named_rollout_of_two_turns(http):
    turns = [call(http, "episode")["interaction"] for _ in range(2)]
    first = http.post("/v1/feedback", json={"interaction_id": turns[0], "reward": 0.25}).json()
    assert first["rollout"]["state"] == "open"
    last = http.post("/v1/feedback", json={"rollout_id": "episode", "reward": 1, "comment": "well done"}).json()
    assert last["rollout"]["state"] == "ready"
    seen = http.get("/v1/rollouts/episode").json()
    assert (seen["state"], seen["return"], seen["client_id"]) == ("ready", 1.25, "episode")
    assert seen["explanation"]
    assert [each["id"] for each in seen["interactions"]] == turns
    assert [each["reward"] for each in seen["interactions"]] == [0.25, None]
    assert {each["completion_tokens"] for each in seen["interactions"]} == {3}
    assert {each["version"] for each in seen["interactions"]} == {0}
    assert [row["comment"] for row in seen["feedback"]] == [None, "well done"]


def test_why_a_rollout_is_not_trained_is_told(http):
    made = call(http, temperature=0)
    answer = http.post("/v1/feedback", json={"rollout_id": made["rollout"], "reward": 1}).json()
    assert answer["rollout"] == {"state": "skipped", "reason": "off_distribution_sampling"}
    seen = http.get(f"/v1/rollouts/{made['rollout']}").json()
    assert seen["reason"] == "off_distribution_sampling"
    assert "not trained" in seen["explanation"]
    (interaction,) = seen["interactions"]
    assert interaction["trainable"] is False
    assert interaction["detail"] == "temperature 0 is below 0.2, the least that is trained."


def test_close_without_a_reward_and_a_reward_in_time(http):
    call(http, "late")
    closed = http.post("/v1/rollouts/late/close").json()
    assert (closed["state"], closed["reason"]) == ("skipped", "no_reward")
    assert http.post("/v1/rollouts/late/close").json()["state"] == "skipped"
    answer = http.post("/v1/feedback", json={"rollout_id": "late", "reward": 1}).json()
    assert answer["rollout"]["state"] == "ready"


def test_the_same_idempotency_key_counts_once(http, world: World):
    made = call(http)
    body = {"rollout_id": made["rollout"], "reward": 1, "idempotency_key": "k1"}
    first = http.post("/v1/feedback", json=body)
    again = http.post("/v1/feedback", json={"idempotency_key": "k1", "reward": 1.0, "rollout_id": made["rollout"]})
    assert again.json() == first.json()
    other = http.post("/v1/feedback", json={**body, "reward": 0})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert world.rollout(made["rollout"]).total_return == 1


def test_an_outcome_without_a_reward(http):
    made = call(http)
    answer = http.post("/v1/feedback", json={"rollout_id": made["rollout"], "outcome": "environment_error"}).json()
    assert answer["rollout"] == {"state": "skipped", "reason": "environment_error"}


def test_a_call_after_the_end_says_so_and_takes_no_reward(http, world: World):
    first = call(http, "ep-A")
    http.post("/v1/feedback", json={"rollout_id": "ep-A", "reward": 1})
    reply = http.post("/v1/chat/completions", json=CHAT, headers={"X-Rollout-Id": "ep-A"})
    assert (reply.status_code, reply.headers["x-untrained-reason"]) == (200, "after_close")
    refused = http.post("/v1/feedback", json={"interaction_id": reply.headers["x-interaction-id"], "reward": -1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "interaction_after_close")
    assert "rollout id of its own" in refused.json()["error"]["message"]
    assert world.rollout(first["rollout"]).total_return == 1.0
    commented = http.post(
        "/v1/feedback", json={"interaction_id": reply.headers["x-interaction-id"], "comment": "a rerun"}
    )
    assert commented.status_code == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 0.1}, "off_distribution_sampling"),
        ({"top_p": 0.5}, "off_distribution_sampling"),
        ({"metadata": {"train": "false"}}, "opted_out"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_why_it_is_not_trained(http, changes, reason, stream):
    reply = http.post("/v1/chat/completions", json={**CHAT, **changes, "stream": stream})
    assert reply.headers.get("x-untrained-reason") == reason
