"""Playing over real HTTP against a server whose learning is scripted, so that every figure is known beforehand."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typer.testing import CliRunner, Result

from envs.cli import simulate_app
from envs.tickets import Tickets
from tests.integration.envs.fake_server import KEY, FakeServer, error, serving

SEED = 7


def knows(environment: Tickets, phase: int, text: str) -> str:
    """What a model that has learned a phase's mapping answers."""
    tickets = environment.training + environment.held_out_tickets
    return environment.mappings[phase - 1][next(t.intent for t in tickets if t.text == text)]


def simulate(url: str, out: Path, *options: str, key: str = KEY, seed: int = SEED) -> Result:
    arguments = ["tickets", "--seed", str(seed), "--out", str(out), "--env-held-out-texts", "12", *options]
    return CliRunner().invoke(
        simulate_app, arguments, env={"EVERGREEN_URL": url, "EVERGREEN_API_KEY": key, "COLUMNS": "300"}
    )


def journal(out: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def rollouts(out: Path) -> list[dict[str, str]]:
    with (out / "rollouts.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary(out: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return answer


def test_phases_figures_and_files(tmp_path: Path) -> None:
    """128 rollouts a phase, one after the other, an update every 16: phase 1 sees versions 0-7, phase 2 8-15.

    Versions 0 and 1 know nothing, 2 to 9 the first mapping, later ones the second: each phase's first 32 fail.
    """
    environment = Tickets(SEED, held_out_texts=12)

    def answer(version: int, text: str) -> str:
        return "purple" if version < 2 else knows(environment, 1 if version < 10 else 2, text).upper() + "\n"

    server = FakeServer(answer)
    server.learning.set()
    with serving(server.app()) as url:
        result = simulate(url, tmp_path, "--phases", "2", "--rollouts-per-phase", "128", "--agents", "1")
    assert result.exit_code == 0, result.output
    figures = summary(tmp_path)
    assert figures["complete"] is True
    for phase, first_version in ((1, 0), (2, 8)):
        # rollout 84 ends the first window of 64 with 12 wrong ones or fewer (52/64 >= 0.8); 83 // 16 = 5 versions in
        assert figures["phases"][phase - 1] == {
            "phase": phase,
            "rollouts": 128,
            "mean_reward_last_256": 0.75,
            "moving_mean_64_reached_0.8": {"rollouts": 84, "versions": 5},
            "failed_requests": {},
            "first_version": first_version,
            "last_version": first_version + 7,
            "greedy": {"version": first_version + 7, "asked": 12, "correct": 12.0, "accuracy": 1.0},
        }
    rows = rollouts(tmp_path)
    assert [int(row["index"]) for row in rows] == list(range(256))
    assert Counter(row["phase"] for row in rows) == {"1": 128, "2": 128}
    assert [float(row["reward"]) for row in rows] == ([0.0] * 32 + [1.0] * 96) * 2
    assert [int(row["version"]) for row in rows] == [index // 16 for index in range(256)]
    assert {row["feedback"] for row in rows} == {"applied"}
    assert {row["state"] for row in rows} == {"trained"}
    # what the client says is what the server has
    assert {row["rollout"]: float(row["reward"]) for row in rows} == {
        identifier: rollout.reward for identifier, rollout in server.rollouts.items() if rollout.train
    }
    assert {line["rollout"] for line in journal(tmp_path, "feedback")} == {row["rollout"] for row in rows}
    assert len(journal(tmp_path, "completion")) == 256
    assert len(journal(tmp_path, "held_out")) == 24
    assert (tmp_path / "curve.html").stat().st_size > 1_000_000


def test_held_out_tickets_are_asked_greedily_pinned_and_opted_out(tmp_path: Path) -> None:
    environment = Tickets(SEED, held_out_texts=12)
    server = FakeServer(lambda version, text: "red")
    server.learning.set()
    with serving(server.app()) as url:
        simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "40")
    held_out = [body for body in server.bodies("/chat/completions") if "metadata" in body]
    assert {body["messages"][-1]["content"] for body in held_out} == {t.text for t in environment.held_out_tickets}
    assert {body["temperature"] for body in held_out} == {0.0}
    assert {body["model"] for body in held_out} == {f"default@{summary(tmp_path)['phases'][0]['greedy']['version']}"}
    assert all(body["metadata"] == {"train": "false"} for body in held_out)
    red = sum(knows(environment, 1, t.text) == "red" for t in environment.held_out_tickets)
    assert summary(tmp_path)["phases"][0]["greedy"]["correct"] == red == 4


def test_a_version_that_was_retired_meanwhile_gives_way_to_the_newest(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red", loaded_versions=1, per_update=10)
    server.learning.set()
    with serving(server.app()) as url:
        # the last ten rollouts are sampled with version 3, and their update retires it
        result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "40", "--agents", "1")
    assert result.exit_code == 0, result.output
    assert server.version == 4
    figures = summary(tmp_path)["phases"][0]
    assert figures["greedy"]["version"] == 4
    assert figures["greedy"]["asked"] == 12
    assert figures["failed_requests"] == {"completion: 404 version_not_loaded": 1}


def test_the_closed_loop_never_has_more_than_64_unfinished(tmp_path: Path) -> None:
    """No learner at first: the player stops at 64, says why, and goes on when the learner does."""
    server = FakeServer(lambda version, text: "red", per_update=32, looks_per_update=3)
    results: list[Result] = []
    with serving(server.app()) as url:
        options = ("--phases", "1", "--rollouts-per-phase", "192", "--agents", "80")
        player = threading.Thread(target=lambda: results.append(simulate(url, tmp_path, *options)), daemon=True)
        player.start()
        assert server.full.wait(20)
        for _ in range(6):  # it keeps asking after its own, and asks nothing new
            assert server.look_made.acquire(timeout=20)
        assert len(server.rollouts) == 64
        server.learning.set()
        player.join(60)
    assert results
    assert results[0].exit_code == 0, results[0].output
    assert server.most_unfinished == 64
    assert summary(tmp_path)["phases"][0]["rollouts"] == 192
    # two looks a second while it waits, and each update (32 rollouts) is found out with at most 64 more
    assert server.looks < 64 * 6 + 200


@pytest.fixture
def trained_at_once() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer(lambda version, text: "red", per_update=1)
    server.learning.set()
    with serving(server.app()) as url:
        yield server, url


def test_the_open_loop_starts_rollouts_at_its_rate_whatever_is_trained(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red")
    with serving(server.app()) as url:
        result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "100", "--rate", "100")
    assert result.exit_code == 0, result.output
    assert server.most_unfinished == 100
    starts = sorted(row["started_at"] for row in rollouts(tmp_path))
    assert len(starts) == 100
    assert summary(tmp_path)["seconds"] >= 0.9  # 99 gaps of 10 ms
    assert {row["state"] for row in rollouts(tmp_path)} == {"ready"}


def test_failed_requests_are_counted_journaled_shown_and_not_sent_again(
    tmp_path: Path, trained_at_once: tuple[FakeServer, str]
) -> None:
    server, url = trained_at_once
    server.faults["/chat/completions"] = [
        error(429, "engine_overloaded", "the engine's queue is full", **{"Retry-After": "0"}),
        error(502, "engine_failed", "the engine died"),
        error(502, "engine_failed", "the engine died"),
    ]
    result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "20", "--agents", "1")
    assert result.exit_code == 0, result.output
    expected = {"completion: 429 engine_overloaded": 1, "completion: 502 engine_failed": 2}
    assert summary(tmp_path)["failed_requests"] == expected
    assert Counter(f"{f['request']}: {f['kind']}" for f in journal(tmp_path, "failed")) == expected
    assert result.output.count("the engine's queue is full") == 1
    assert len(server.bodies("/chat/completions")) == 3 + 20 + 12
    assert len(rollouts(tmp_path)) == 20


def test_a_reward_is_sent_again_with_the_same_key_until_it_is_acknowledged(
    tmp_path: Path, trained_at_once: tuple[FakeServer, str]
) -> None:
    server, url = trained_at_once
    server.faults["/feedback"] = [error(503, "writer_full", "later", **{"Retry-After": "0"})]
    result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "5", "--agents", "1")
    assert result.exit_code == 0, result.output
    sent = server.bodies("/feedback")
    assert len(sent) == 6
    assert sent[0] == sent[1]
    assert len({body["idempotency_key"] for body in sent}) == 5
    assert summary(tmp_path)["failed_requests"] == {"feedback: 503 writer_full": 1}


def test_a_reward_that_is_refused_is_reported_and_the_run_goes_on(
    tmp_path: Path, trained_at_once: tuple[FakeServer, str]
) -> None:
    server, url = trained_at_once
    server.faults["/feedback"] = [error(400, "reward_out_of_range", "too large")]
    result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "5", "--agents", "1")
    assert result.exit_code == 0, result.output
    assert [row["feedback"] for row in rollouts(tmp_path)] == ["failed"] + ["applied"] * 4
    assert len(server.bodies("/feedback")) == 5
    assert [line["rollout"] for line in journal(tmp_path, "reward_lost")] == [rollouts(tmp_path)[0]["rollout"]]
    assert "gave up posting the reward" in result.output


def test_it_goes_on_after_the_server_was_away(tmp_path: Path) -> None:
    """The server stops and comes back on the same port: rewards arrive late, nothing acknowledged is lost."""
    server = FakeServer(lambda version, text: "red", per_update=1)
    server.learning.set()
    results: list[Result] = []
    reached = threading.Event()
    chat = server.chat

    async def chat_and_tell(request: Any) -> Any:
        if len(server.rollouts) >= 60:
            reached.set()
        return await chat(request)

    server.chat = chat_and_tell  # type: ignore[method-assign]
    with serving(server.app()) as url:
        player = threading.Thread(
            target=lambda: results.append(simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "400")),
            daemon=True,
        )
        player.start()
        assert reached.wait(20)
    while not (tmp_path / "journal.jsonl").read_text().count("unreachable"):
        player.join(0.05)
        assert player.is_alive()
    with serving(server.app(), port=int(url.rsplit(":", 1)[1])):
        player.join(60)
    assert results
    assert results[0].exit_code == 0, results[0].output
    assert len(rollouts(tmp_path)) == 400
    acknowledged = {line["rollout"] for line in journal(tmp_path, "completion")}
    assert acknowledged <= server.rollouts.keys()
    assert all(server.rollouts[rollout].reward is not None for rollout in acknowledged)
    assert any(kind.endswith("unreachable") for kind in summary(tmp_path)["failed_requests"])


def test_it_gives_up_a_server_that_went_away_while_it_waits_for_the_learner(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red")
    results: list[Result] = []
    options = ("--phases", "1", "--rollouts-per-phase", "100", "--agents", "80", "--give-up-after", "2")
    with serving(server.app()) as url:
        player = threading.Thread(target=lambda: results.append(simulate(url, tmp_path, *options)), daemon=True)
        player.start()
        while len(server.bodies("/feedback")) < 64:
            assert server.look_made.acquire(timeout=20)
    player.join(30)
    assert results
    assert results[0].exit_code == 1
    assert "stopped: nothing but failed requests for" in results[0].output


def test_it_stops_with_a_sentence(tmp_path: Path, trained_at_once: tuple[FakeServer, str]) -> None:
    server, url = trained_at_once
    refused = simulate(url, tmp_path / "refused", key="eg-wrong")
    assert refused.exit_code == 1
    assert "the server refuses the key: the key is not known; set EVERGREEN_API_KEY" in refused.output
    assert not (tmp_path / "refused").exists()  # so that the same command works with the right key
    away = simulate("http://127.0.0.1:9", tmp_path / "away")
    assert away.exit_code == 1
    assert "no Evergreen server answers at http://127.0.0.1:9/v1; start one, or set EVERGREEN_URL" in away.output
    unknown = simulate(url, tmp_path / "unknown", "--policy", "nobody")
    assert unknown.exit_code == 1
    assert "404 model_not_found: there is no nobody" in unknown.output
    assert summary(tmp_path / "unknown")["complete"] is False
    server.faults["/chat/completions"] = [error(503, "policy_preparing", "version 0 is being written")]
    preparing = simulate(url, tmp_path / "preparing", "--give-up-after", "0")
    assert preparing.exit_code == 1
    assert "nothing but failed requests for 0 s; the last: completion: 503 policy_preparing" in preparing.output
    no_key = simulate(url, tmp_path / "no_key", key="")
    assert no_key.exit_code == 2
    assert "EVERGREEN_API_KEY" in no_key.output
    again = simulate(url, tmp_path / "unknown")
    assert again.exit_code == 2
    assert "already holds a run" in again.output


def test_an_interrupted_run_leaves_what_it_has_measured(tmp_path: Path) -> None:
    """A real process, stopped with Ctrl-C while it waits for a learner that is not there."""
    server = FakeServer(lambda version, text: "red")
    with serving(server.app()) as url:
        command = [sys.executable, "-m", "envs.cli", "tickets", "--seed", str(SEED), "--out", str(tmp_path)]
        environment = os.environ | {"EVERGREEN_URL": url, "EVERGREEN_API_KEY": KEY}
        player = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            # a shell starts what runs in its background with SIGINT ignored, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert server.full.wait(30)
        while len(server.bodies("/feedback")) < 64:
            assert server.look_made.acquire(timeout=30)
        for _ in range(4):  # two rounds of looks later it has read the last reply
            assert server.look_made.acquire(timeout=30)
        player.send_signal(signal.SIGINT)
        player.communicate(timeout=120)
    assert player.returncode == 130
    assert summary(tmp_path)["complete"] is False
    assert summary(tmp_path)["phases"][0]["rollouts"] == 64
    assert {row["rollout"] for row in rollouts(tmp_path)} == server.rollouts.keys()
    assert len(journal(tmp_path, "feedback")) == 64


def test_replies_that_are_no_completions_are_failures(tmp_path: Path, trained_at_once: tuple[FakeServer, str]) -> None:
    server, url = trained_at_once
    server.faults["/chat/completions"] = [
        JSONResponse({}),
        PlainTextResponse("hello"),
        Response("{no json", media_type="application/json"),
        JSONResponse({"id": "x", "choices": [{"message": {"content": "red"}}]}),
    ]
    server.faults["/feedback"] = [PlainTextResponse("ok")]
    result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "3", "--agents", "1")
    assert result.exit_code == 0, result.output
    assert summary(tmp_path)["failed_requests"] == {
        "completion: unusable reply": 4,
        "feedback: unusable reply": 1,
    }
