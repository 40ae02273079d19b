"""Policies on base models of their own, and what becomes of one whose directory is no model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.db.repositories.policies import create_policy
from app.policies.learning import LearningSettings
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World, found_world
from tests.tiny_tokenizer import write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def own(tmp_path: Path, base_model: Path) -> Iterator[World]:
    """A database of its own, not served yet."""
    world = found_world(tmp_path / "home", base_model)
    yield world
    world.database.close()


def test_a_policy_is_refused_whose_base_model_could_not_be_served(own: World, tmp_path: Path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    (directory / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with serving(own.app) as server:
        own.url = server.url
        with own.http() as http:
            body = {"name": "second", "base_model": f"{directory}/"}
            refused = http.post("/admin/policies", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "base_model")
            assert f"{directory} holds no tokenizer.json" in refused.json()["error"]["message"]
            assert [policy["name"] for policy in http.get("/admin/policies").json()["data"]] == ["default"]
            (tmp_path / "tokenizer.json").rename(directory / "tokenizer.json")
            made = http.post("/admin/policies", json=body)
    assert (made.status_code, made.json()["base_model"]) == (201, str(directory))


def test_a_base_model_that_cannot_be_read_keeps_nobody_elses_policy_from_being_served(
    own: World, tmp_path: Path, engine_server: Server
):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with own.database.write() as session:
        create_policy(session, name="broken", base_model=str(broken), settings=LearningSettings())
    own.add_replica(engine_server.url, 0)
    with serving(own.app) as server:
        own.url = server.url
        with own.http() as http:
            served = http.post("/v1/chat/completions", json={"model": "default", "messages": HELLO})
            refused = http.post("/v1/chat/completions", json={"model": "broken", "messages": HELLO})
    assert served.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "base_model_unreadable")
    assert "holds no tokenizer.json" in refused.json()["error"]["message"]
