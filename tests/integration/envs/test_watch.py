"""Watching versions while rollouts are played, over real HTTP against a server whose learning is scripted."""

import csv
from collections import Counter
from pathlib import Path

from envs.tickets import QUEUES, Tickets
from envs.watch import spread
from tests.integration.envs.fake_server import FakeServer, serving
from tests.integration.envs.test_play import SEED, knows, simulate


def test_every_watched_answer_says_its_version_phase_and_habit(tmp_path: Path) -> None:
    environment = Tickets(SEED, held_out_texts=12)

    def answer(version: int, text: str) -> str:
        return "purple" if version < 2 else knows(environment, 1, text)

    server = FakeServer(answer)
    server.learning.set()
    with serving(server.app()) as url:
        result = simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "96", "--watch", "6", "--agents", "1")
    assert result.exit_code == 0, result.output
    with (tmp_path / "held_out.csv").open() as file:
        rows = list(csv.DictReader(file))
    per_version = Counter(int(row["version"]) for row in rows)
    assert len(per_version) >= 2
    assert set(per_version.values()) == {6}  # each version whole, or not at all
    for row in rows:
        assert row["phase"] == "1"
        if int(row["version"]) < 2:
            assert (row["category"], float(row["reward"])) == ("no queue", 0.0)
        else:
            assert row["category"] in QUEUES
            assert float(row["reward"]) == 1.0
    watched = [body for path, body in server.requests if "@" in str(body.get("model")) and body.get("temperature") == 1]
    assert len(watched) == len(rows)
    assert all(body["metadata"]["train"] == "false" for body in watched)


def test_nothing_is_watched_unless_asked(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red")
    server.learning.set()
    with serving(server.app()) as url:
        assert simulate(url, tmp_path, "--phases", "1", "--rollouts-per-phase", "64").exit_code == 0
    assert not (tmp_path / "held_out.csv").exists()


def test_the_watched_episodes_are_spread_over_all() -> None:
    episodes = Tickets(SEED, held_out_texts=12).held_out(1)
    assert spread(episodes, 4) == [episodes[n] for n in (0, 3, 6, 9)]
    assert spread(episodes, 50) == episodes


def test_the_url_may_end_as_openai_clients_name_it(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red")
    server.learning.set()
    with serving(server.app()) as url:
        result = simulate(f"{url}/v1", tmp_path, "--phases", "1", "--rollouts-per-phase", "16")
    assert result.exit_code == 0, result.output
