"""Rollouts of several turns over real HTTP: one name per rollout, one reward at its end, nothing left open."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from envs.cli import simulate_app
from envs.tools import Tools
from envs.writing import Writing
from tests.integration.envs.fake_server import KEY, FakeServer, error, serving
from tests.integration.envs.recording_proxy import RecordingProxy
from tests.integration.envs.test_play import journal, rollouts, summary

SEED = 2


def simulate(environment: str, url: str, out: Path, *options: str) -> Result:
    arguments = [environment, "--seed", str(SEED), "--out", str(out), "--give-up-after", "9", *options]
    return CliRunner().invoke(
        simulate_app, arguments, env={"EVERGREEN_URL": url, "EVERGREEN_API_KEY": KEY, "COLUMNS": "300"}
    )


def agent(messages: list[dict[str, str]]) -> str:
    """Knows phase 1's API, and believes the errors of later ones."""
    api, acts = Tools(SEED).apis[0], {"Cancel": "cancel", "Refund": "refund"}
    requests = [n for n, message in enumerate(messages) if re.match(r"Cancel|Refund", message["content"])]
    (task, order), parcel = re.findall(r"(\w+) order (\d+)", messages[requests[-1]]["content"])[0], None
    instead: dict[str, str] = {}
    for message in messages[requests[-1] + 1 :]:
        if found := re.match(r"parcel (\d+)", message["content"]):
            parcel = found[1]
        if refused := re.match(r"error: no (\w+), use (\w+)", message["content"]):
            instead[refused[1]] = refused[2]
    if parcel is None:
        return f"{instead.get(api.lookup, api.lookup)}(order={order})"
    return f"{instead.get(acts[task], acts[task])}({instead.get(api.argument, api.argument)}={parcel})"


def test_a_rollout_of_several_turns_has_one_name_and_one_reward(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "", answer_turn=agent)
    server.learning.set()
    options = ("--rollouts-per-phase", "48", "--env-held-out-orders", "6", "--agents", "4")
    with serving(server.app()) as url:
        proxy = RecordingProxy(url)
        with serving(proxy.app()) as proxied:
            result = simulate("tools", proxied, tmp_path, *options)
    assert result.exit_code == 0, result.output
    rows = rollouts(tmp_path)
    assert [int(row["index"]) for row in rows] == list(range(4 * 48))
    # the first API needs two calls; each change costs one call, and that half of the reward: after the last one a
    # cancellation meets two refusals (lookup, argument), a refund three
    expected = {"1": {("2", 1.0)}, "2": {("3", 0.5)}, "3": {("4", 0.25)}, "4": {("4", 0.25), ("5", 0.125)}}
    for phase, outcomes in expected.items():
        assert {(row["turns"], float(row["reward"])) for row in rows if row["phase"] == phase} == outcomes
    assert [phase["greedy"]["correct"] for phase in summary(tmp_path)["phases"]] == [
        6.0,
        3.0,
        1.5,
        3 * 0.25 + 3 * 0.125,
    ]
    assert all(row["answer"].count("\n") == int(row["turns"]) - 1 for row in rows)

    trained = {identifier: one for identifier, one in server.rollouts.items() if one.train}
    assert {row["rollout"]: float(row["reward"]) for row in rows} == {i: one.reward for i, one in trained.items()}
    assert [len(trained[row["rollout"]].interactions) for row in rows] == [int(row["turns"]) for row in rows]
    assert Counter(line["rollout"] for line in journal(tmp_path, "completion")) == {
        row["rollout"]: int(row["turns"]) for row in rows
    }
    assert {line["interaction"] for line in journal(tmp_path, "feedback")} == {row["interaction"] for row in rows}
    assert server.most_unfinished <= 64

    chats: dict[str, list[list[dict[str, str]]]] = {}
    for request in proxy.recorded:
        if request.path == "/v1/feedback":
            assert request.json == {
                "interaction_id": request.json["interaction_id"],
                "reward": request.json["reward"],
                "idempotency_key": f"reward-{request.json['interaction_id']}",
                "final": True,
            }
        elif request.path == "/v1/chat/completions":
            metadata = request.json["metadata"]
            assert metadata.keys() in ({"rollout_id"}, {"train"})
            assert request.json.keys() == {"model", "messages", "temperature", "max_tokens", "metadata"}
            chats.setdefault(metadata.get("rollout_id", ""), []).append(request.json["messages"])
    held_out = chats.pop("")
    assert len(held_out) == 6 * (2 + 3 + 4) + 3 * (4 + 5)
    assert len(chats) == len(rows)
    for turns in chats.values():  # each turn's messages go on where the last one's ended
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(turns))
        assert all(len(later) == len(earlier) + 2 for earlier, later in pairwise(turns))


def test_a_rollout_whose_question_fails_is_closed_and_another_takes_its_place(tmp_path: Path) -> None:
    """The second turn of the first rollout fails, and so does telling the server that it is over; later the first
    turn of one fails."""
    server = FakeServer(lambda version, text: "", answer_turn=agent, per_update=1)
    server.learning.set()
    chat = server.chat
    asked = 0

    async def failing_chat(request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked in (2, 5, 8):
            server.faults["/chat/completions"] = [error(502, "engine_failed", "the engine died")]
        return await chat(request)

    server.chat = failing_chat  # type: ignore[method-assign]
    first = "/rollouts/00000000-0000-7000-8000-000000000000/close"
    server.faults[first] = [error(503, "store_unavailable", "later")]
    options = ("--phases", "1", "--rollouts-per-phase", "10", "--env-held-out-orders", "1", "--agents", "1")
    with serving(server.app()) as url:
        result = simulate("tools", url, tmp_path, *options)
    assert result.exit_code == 0, result.output
    rows = rollouts(tmp_path)
    assert [int(row["index"]) for row in rows] == list(range(10))
    assert {row["state"] for row in rows} == {"trained"}
    # requests 1, 2x | 3, 4 | 5x | 6, 7 | 8x | ...: the failed first turns left nothing behind
    assert [one.state for one in server.rollouts.values() if one.train] == ["open"] + ["trained"] * 10
    assert summary(tmp_path)["failed_requests"] == {
        "completion: 502 engine_failed": 3,
        "close: 503 store_unavailable": 1,
    }
    assert len(journal(tmp_path, "completion")) == 1 + 2 * 10
    assert len(server.bodies("/close")) == 1


def test_writing_is_played_in_single_turns_and_its_answers_tell_the_styles(tmp_path: Path) -> None:
    environment = Writing(SEED)
    server = FakeServer(lambda version, text: f"Wow, my {text.removeprefix('Topic: ')} sings like no other!")
    server.learning.set()
    options = ("--rollouts-per-phase", "32", "--env-held-out-topics", "5", "--agents", "4")
    with serving(server.app()) as url:
        result = simulate("writing", url, tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert environment.rewarded[0] == "amazed"
    means = [phase["mean_reward_last_256"] for phase in summary(tmp_path)["phases"]]
    assert means == [1.0, 0.0, 0.0]
    assert {row["turns"] for row in rollouts(tmp_path)} == {"1"}
    assert all("metadata" not in body or body["metadata"] == {"train": "false"} for _, body in server.requests)
    assert not any("final" in body for body in server.bodies("/feedback"))
    held_out = journal(tmp_path, "held_out")
    assert [json.dumps(line["answer"]).count("Wow") for line in held_out] == [1] * 15
