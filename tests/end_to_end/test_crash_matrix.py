"""Kill -9 of whole process groups at named points, while a simulation runs against `evergreen up`.

After every kill the server must be back within a minute: it answers, takes rewards, commits an update and serves it.
In the end the client's own journal is compared with the database. Once for a policy that trains adapters and once for
one that trains all weights, each at all points that it has.
"""

import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import httpx
import pytest
from transformers import AutoTokenizer

from tests.contract.tiny_model import build_base_model
from tests.integration.control.processes import ROOT, eventually, process
from tests.tiny_tokenizer import SMOLLM2_TEMPLATE

pytestmark = pytest.mark.slow

PORT, ENGINE_PORT = 27110, 27111
BACK_WITHIN_S = 60.0

POINTS = {
    "interaction_begin": "app.rollouts.lifecycle begin_interaction",
    "interaction_commit": "app.rollouts.lifecycle complete_interaction",
    "reply": "app.inference.interaction RunningInteraction.complete",
    "feedback_commit": "app.feedback.rules apply_feedback",
    "write_group": "app.db.writer Writer._commit",
    "claim": "app.rollouts.learning claim_update",
    "policy_step": "learner.step policy_step",
    "file_rename": "learner.artifacts publish",
    "update_commit": "app.rollouts.leases commit_update",
    "update_in_memory": "learner.state LearnerState.after",
    "deploy_load": "app.engine.control_client ControlClient.load_adapter",
    "deploy_live": "app.db.repositories.deployments go_live",
    "engine_load": "app.engine.embedded.adapters AdapterStore.load",
    "engine_step": "app.engine.embedded.engine Engine.step",
    "swap_pause": "app.engine.control_client ControlClient.pause",
    "swap_reload": "app.engine.control_client ControlClient.reload_weights",
    "swap_label": "app.engine.control_client ControlClient.label_weights",
    "swap_resume": "app.engine.control_client ControlClient.resume",
    "engine_reload": "app.engine.embedded.engine Engine.reload_weights",
}
"""point -> module and attribute. `commit_update` before: nothing is written; after: written, not committed;
`update_in_memory` before: committed, and the process does not know it yet. The same for `complete_interaction` (not
committed) and `reply` after (committed, not sent)."""

SWAP = {point for point in POINTS if point.startswith("swap") or point == "engine_reload"}
ADAPTERS = {"deploy_load", "engine_load"}
POINTS_OF = {
    "lora": [point for point in POINTS if point not in SWAP],
    "full": [point for point in POINTS if point not in ADAPTERS],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The points of a class are those of what its policy trains."""
    if "case" in metafunc.fixturenames:
        points = POINTS_OF[metafunc.cls.training]
        metafunc.parametrize("case", [f"{point}-{moment}" for point in points for moment in ("before", "after")])


@dataclass(frozen=True)
class Stack:
    home: Path
    kill_dir: Path
    journal: Path
    url: str

    def get(self, path: str) -> Any:
        response = httpx.get(f"{self.url}{path}", headers=self._headers(), timeout=10, trust_env=False)
        response.raise_for_status()
        return response.json()

    def answers(self) -> bool:
        body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "red?"}],
                "metadata": {"train": "false"}}  # fmt: skip
        try:
            reply = httpx.post(
                f"{self.url}/v1/chat/completions", headers=self._headers(), json=body, timeout=10, trust_env=False
            )
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK

    def updates(self) -> list[tuple[str, str, int | None]]:
        return self.query("select id, state, version from updates order by started_at")

    def live(self) -> int:
        return int(self.query("select live from policies")[0][0])

    def query(self, sql: str) -> list[Any]:
        connection = sqlite3.connect(f"file:{self.home / 'evergreen.db'}?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def journal_lines(self, event: str) -> list[dict[str, Any]]:
        text = self.journal.read_text()
        whole = text[: text.rfind("\n") + 1]
        return [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.home / 'admin.key').read_text().strip()}"}


@pytest.fixture(scope="class")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One server for all tests of a class: what its last tests look at has lived through every kill."""
    folder = tmp_path_factory.mktemp("crash")
    base = build_base_model(folder / "base", context=2048)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    tokenizer.save_pretrained(base)
    kill_dir = folder / "kill"
    kill_dir.mkdir()
    (kill_dir / "points").write_text("".join(f"{point} {where}\n" for point, where in POINTS.items()))
    home = folder / "home"
    wrapper = ROOT / "tests" / "end_to_end" / "crash"
    environment = {
        "PYTHONPATH": f"{wrapper}{os.pathsep}{ROOT}", "EVERGREEN_TEST_KILL_DIR": str(kill_dir),
        "EVERGREEN_HOME": str(home), "EVERGREEN_MODEL": str(base), "EVERGREEN_DTYPE": "float32",
        "EVERGREEN_PORT": str(PORT), "EVERGREEN_ENGINE_PORT": str(ENGINE_PORT),
        "EVERGREEN_TRAINING": request.cls.training,
    }  # fmt: skip
    running = Stack(home, kill_dir, folder / "run" / "journal.jsonl", f"http://127.0.0.1:{PORT}")
    with process([sys.executable, "-m", "evergreen.cli", "up"], folder / "console", **environment) as up:
        eventually(lambda: "Evergreen is ready" in (folder / "console").read_text() or up.poll() is not None,
                   within_s=180, what="readiness")  # fmt: skip
        assert up.poll() is None, (folder / "console").read_text()
        play = [sys.executable, "-m", "envs.cli", "tickets", "--seed", "5", "--out", str(folder / "run"),
                "--rollouts-per-phase", "1000000", "--agents", "4"]  # fmt: skip
        client = {"PYTHONPATH": str(ROOT), "EVERGREEN_URL": running.url,
                  "EVERGREEN_API_KEY": (home / "admin.key").read_text().strip()}  # fmt: skip
        with process(play, folder / "client", **client) as player:
            eventually(lambda: running.live() >= 1, within_s=240, what="a first learned version to be served")
            yield running
            assert player.poll() is None, (folder / "client").read_text()[-2000:]
            assert up.poll() is None, (folder / "console").read_text()[-2000:]


class CrashMatrix:
    """What holds after a kill; a class per training mode collects it."""

    training: ClassVar[str]

    @pytest.mark.timeout(400)
    def test_the_server_is_back_within_a_minute(self, stack: Stack, case: str) -> None:
        armed = stack.kill_dir / case
        known = {update for update, _, _ in stack.updates()}
        acknowledged = len(stack.journal_lines("feedback"))
        armed.touch()
        eventually(lambda: not armed.exists(), within_s=120, what=f"a process to reach {case}")
        killed = time.monotonic()

        def back() -> bool:
            new = [version for update, state, version in stack.updates() if update not in known and state == "done"]
            return (
                len(stack.journal_lines("feedback")) > acknowledged
                and bool(new)
                and stack.live() >= max(version or 0 for version in new)
                and stack.answers()
            )

        eventually(back, within_s=BACK_WITHIN_S, what=f"answers, rewards and a newly served update after {case}")
        print(f"{case}: back after {time.monotonic() - killed:.1f} s")

    def test_nothing_acknowledged_is_missing(self, stack: Stack) -> None:
        """Runs last, on everything that the kills have left."""
        completions = {line["interaction"] for line in stack.journal_lines("completion")}
        feedback = {line["idempotency_key"]: line["reward"] for line in stack.journal_lines("feedback")}
        assert len(completions) > 100
        stored = {str(UUID(row[0])) for row in stack.query("select id from interactions where state = 'completed'")}
        assert completions <= stored
        values = dict(stack.query("select idempotency_key, value from feedback"))
        assert feedback.items() <= values.items()

    def test_no_rollout_is_trained_twice(self, stack: Stack) -> None:
        rows = stack.query(
            "select ur.rollout_id from update_rollouts ur join updates u on u.id = ur.update_id where u.state = 'done'"
        )
        assert rows
        twice = [rollout for (rollout,), times in Counter(rows).items() if times > 1]
        assert twice == []

    def test_version_numbers_have_no_gap(self, stack: Stack) -> None:
        def numbers() -> list[int]:
            return [number for (number,) in stack.query("select number from policy_versions order by number")]

        found = numbers()
        assert found == list(range(len(found)))
        made = [version for _, state, version in stack.updates() if state == "done" and version is not None]
        assert made == list(range(1, len(made) + 1))

    def test_no_rollout_is_left_behind(self, stack: Stack) -> None:
        """A rollout in training belongs to an update that runs."""
        orphans = stack.query(
            "select r.id from rollouts r left join updates u on u.id = r.update_id "
            "where r.state = 'training' and (u.state is null or u.state <> 'running')"
        )
        assert orphans == []


class TestAdapters(CrashMatrix):
    training = "lora"


class TestAllWeights(CrashMatrix):
    training = "full"
