"""The Python examples of README.md and docs/api.md do what they say."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service.world import World

Output = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]


def run(document: str, world: World, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All Python blocks of a document, one after the other as a reader would. Returns their names."""
    (home / "var").mkdir()
    (home / "var" / "admin.key").write_text(world.secrets["all"] + "\n")
    monkeypatch.chdir(home)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert any("evergreen.client" in block for block in blocks)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:8000", world.url), document, "exec"), names)
    return names


def view(world: World, rollout_id: str) -> dict[str, Any]:
    with world.http() as http:
        return http.get(f"/v1/rollouts/{rollout_id}").json()


def test_the_readme(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output):
    names = run("README.md", world, tmp_path, monkeypatch)
    made = view(world, names["episode"].rollout_id)
    assert (made["state"], made["return"], len(made["interactions"])) == ("ready", 1.0, 1)  # "abc" is one word
    assert "The rollout is ready and waits for an update." in capsys.readouterr().out


def test_the_api_page(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = run("docs/api.md", world, tmp_path, monkeypatch)
    made = view(world, names["episode"].rollout_id)
    assert (made["state"], made["return"], len(made["interactions"])) == ("ready", 1.1, 2)
    assert [row["reward"] for row in made["interactions"]] == [0.1, None]
    assert capsys.readouterr().out.startswith("ready The reward is stored.")
