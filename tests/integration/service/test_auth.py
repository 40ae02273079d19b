"""Keys: who may do what, and revocation."""

import pytest

from app import auth
from tests.integration.service.world import World

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


def code_of(reply) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Basic abc", "missing_api_key"),
        ("Bearer eg-wrong", "invalid_api_key"),
        ("Bearer \xe9", "invalid_api_key"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/rollouts/x", "/admin/keys"])
def test_without_a_key(world: World, path: str, header: str | None, code: str):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with world.http(None) as http:
        reply = http.get(path, headers=headers)
    assert code_of(reply) == (401, code)
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("key", "method", "path", "scope"),
    [
        ("feedback", "POST", "/v1/chat/completions", "'inference'"),
        ("admin", "POST", "/v1/completions", "'inference'"),
        ("admin", "GET", "/v1/models", "'inference'"),
        ("inference", "POST", "/v1/feedback", "'feedback'"),
        ("admin", "GET", "/v1/rollouts/x", "'inference' or 'feedback'"),
        ("inference", "GET", "/admin/stats", "'admin'"),
        ("feedback", "POST", "/admin/keys", "'admin'"),
        ("feedback", "PUT", "/admin/policies/default/learning", "'admin'"),
    ],
)
def test_a_scope_that_is_missing_is_named(world: World, key: str, method: str, path: str, scope: str):
    with world.http(key) as http:
        reply = http.request(method, path, json={})
    assert code_of(reply) == (403, "insufficient_scope")
    assert scope in reply.json()["error"]["message"]


def test_every_admin_path_needs_the_admin_scope(world: World):
    with world.http(None) as http:
        paths = http.get("/openapi.json").json()["paths"]
    admin = [(path, method) for path, methods in paths.items() if path.startswith("/admin") for method in methods]
    assert len(admin) > 12
    with world.http("other") as http:
        for path, method in admin:
            assert http.request(method, path, json={}).status_code == 403, path


def test_a_key_of_its_own_for_one_policy(world: World):
    with world.http() as http:
        made = http.post("/admin/policies", json={"name": "second"})
        assert made.status_code == 201, made.text
        key = http.post("/admin/keys", json={"name": "k", "scopes": ["inference"], "policy": "second"})
        assert key.status_code == 201
        world.secrets["bound"] = key.json()["secret"]
        listed = http.get("/admin/keys").json()["data"]
    assert key.json()["secret"].startswith("eg-")
    assert all("secret" not in row and "hash" not in row for row in listed)
    with world.http("bound") as http:
        assert code_of(http.post("/v1/chat/completions", json=CHAT)) == (403, "policy_not_allowed")
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["second"]
        assert http.get("/v1/models/default").status_code == 404
        assert http.get("/v1/models/default@0").status_code == 404
        preparing = http.post("/v1/chat/completions", json={**CHAT, "model": "second"})
        assert code_of(preparing) == (503, "policy_preparing")


def test_a_revoked_key_is_refused_once_the_cache_is_old(world: World, monkeypatch: pytest.MonkeyPatch):
    with world.http() as http:
        made = http.post("/admin/keys", json={"name": "short", "scopes": ["inference"]}).json()
        world.secrets["short"] = made["secret"]
        with world.http("short") as user:
            assert user.get("/v1/models").status_code == 200
            revoked = http.delete(f"/admin/keys/{made['id']}").json()
            assert revoked["revoked_at"] is not None
            clock = auth.time.monotonic
            monkeypatch.setattr(auth.time, "monotonic", lambda: clock() + auth.KEY_CACHE_S)
            assert code_of(user.get("/v1/models")) == (401, "invalid_api_key")


def test_another_keys_rollouts_are_out_of_reach_but_a_judge_sees_all(world: World):
    with world.http("inference") as http:
        reply = http.post("/v1/chat/completions", json=CHAT, headers={"X-Rollout-Id": "mine"})
        rollout, interaction = reply.headers["x-rollout-id"], reply.headers["x-interaction-id"]
        assert http.get("/v1/rollouts/mine").json()["id"] == rollout
    with world.http("other") as http:
        assert http.get(f"/v1/rollouts/{rollout}").status_code == 404
        refused = http.post("/v1/feedback", json={"interaction_id": interaction, "reward": 1})
        assert code_of(refused) == (404, "interaction_not_found")
    with world.http("feedback") as http:
        assert http.post("/v1/feedback", json={"interaction_id": interaction, "reward": 1}).status_code == 200
        assert http.post("/v1/rollouts/mine/close").json()["state"] == "ready"
