"""`--group-size G`: every prompt G times, under a name that says nothing but which rollouts belong together."""

import re
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

from envs.tickets import Tickets
from envs.tools import Tools
from tests.integration.envs import test_turns
from tests.integration.envs.fake_server import FakeServer, error, serving
from tests.integration.envs.test_play import SEED, journal, rollouts, simulate, summary


def trained(server: FakeServer) -> list[dict[str, Any]]:
    return [body for body in server.bodies("/chat/completions") if body.get("metadata", {}).get("train") is None]


def prompts_of_groups(bodies: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for body in bodies:
        found.setdefault(body["metadata"]["group"], []).append(body["messages"][-1]["content"])
    return found


def test_a_group_is_one_prompt_asked_so_many_times(tmp_path: Path) -> None:
    """Two phases of 24 rollouts in groups of 4, several at once, one question failing: 6 prompts a phase."""
    server = FakeServer(lambda version, text: "red", per_update=8)
    server.learning.set()
    server.faults["/chat/completions"] = [error(502, "engine_failed", "the engine died")]
    options = ("--phases", "2", "--rollouts-per-phase", "24", "--group-size", "4", "--agents", "3")
    with serving(server.app()) as url:
        result = simulate(url, tmp_path, *options)
    assert result.exit_code == 0, result.output
    failed, *answered = trained(server)
    groups = prompts_of_groups(answered)
    assert [len(prompts) for prompts in groups.values()] == [4] * 12
    assert all(len(set(prompts)) == 1 for prompts in groups.values())
    # the one that failed was asked anew in the same group
    assert groups[failed["metadata"]["group"]] == [failed["messages"][-1]["content"]] * 4
    # each phase goes through the tickets as it would without groups, each of them four times
    environment = Tickets(SEED, held_out_texts=12)
    asked = {prompts[0] for prompts in groups.values()}
    assert asked == {environment.reset(i, 1).messages[-1]["content"] for i in (*range(6), *range(24, 30))}
    rows = rollouts(tmp_path)
    assert [int(row["index"]) for row in rows] == list(range(48))
    assert [phase["rollouts"] for phase in summary(tmp_path)["phases"]] == [24, 24]
    assert summary(tmp_path)["group_size"] == 4
    assert Counter(line["group"] for line in journal(tmp_path, "completion")) == dict.fromkeys(groups, 4)


def test_nothing_but_a_random_name_is_added(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red", per_update=8)
    server.learning.set()
    with serving(server.app()) as url:
        simulate(url, tmp_path, "--phases", "2", "--rollouts-per-phase", "16", "--group-size", "8")
    for body in server.bodies("/chat/completions"):
        assert body.keys() == {"model", "messages", "temperature", "max_tokens", "metadata"}
        assert body["metadata"].keys() in ({"group"}, {"train"})
    names = {body["metadata"]["group"] for body in trained(server)}
    assert len(names) == 4
    assert all(UUID(name).version == 4 for name in names)


def test_rollouts_of_several_turns_name_their_group_in_every_turn(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "", answer_turn=test_turns.agent)
    server.learning.set()
    options = ("--phases", "1", "--rollouts-per-phase", "12", "--env-held-out-orders", "2", "--group-size", "3")
    with serving(server.app()) as url:
        result = test_turns.simulate("tools", url, tmp_path, *options)
    assert result.exit_code == 0, result.output
    group_of: dict[str, set[str]] = {}
    tasks: dict[str, set[str]] = {}
    for body in trained(server):
        metadata = body["metadata"]
        assert metadata.keys() == {"rollout_id", "group"}
        group_of.setdefault(metadata["rollout_id"], set()).add(metadata["group"])
        requests = [m["content"] for m in body["messages"] if re.match(r"Cancel|Refund", m["content"])]
        tasks.setdefault(metadata["group"], set()).add(requests[-1])
    assert all(len(names) == 1 for names in group_of.values())
    assert Counter(name for names in group_of.values() for name in names) == dict.fromkeys(tasks, 3)
    environment = Tools(test_turns.SEED, phases=1, held_out_orders=2)
    expected = [environment.reset(index, 1).messages[-1]["content"] for index in range(4)]
    assert sorted(task for found in tasks.values() for task in found) == sorted(expected)


def test_a_phase_that_is_no_whole_number_of_groups_is_refused(tmp_path: Path) -> None:
    result = simulate("http://127.0.0.1:1", tmp_path, "--rollouts-per-phase", "30", "--group-size", "4")
    assert result.exit_code == 2
    assert "30 rollouts is no whole number of groups of 4" in re.sub(r"[\s│]+", " ", result.output)
    # the closed loop holds 64 rollouts: a larger group would never be whole
    assert simulate("http://127.0.0.1:1", tmp_path, "--group-size", "65").exit_code == 2


def test_without_groups_nothing_is_said(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red", per_update=1)
    server.learning.set()
    with serving(server.app()) as url:
        simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "4")
    assert all("metadata" not in body for body in trained(server))
    assert all("group" not in line for line in journal(tmp_path, "completion"))
