"""What operators read and change."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from sqlalchemy import select

from app.db.models import ApiKey, Policy, PolicyVersion
from app.db.repositories.events import add_event
from app.rollouts.claimed import Claim
from app.rollouts.learning import UpdateDone, claim_update, commit_update
from tests.integration.service.servers import Server, serving
from tests.integration.service.world import World, found_world

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def http(world: World):
    with world.http() as client:
        yield client


def rewarded(http, reward: float = 1.0) -> str:
    reply = http.post("/v1/chat/completions", json=CHAT)
    http.post("/v1/feedback", json={"interaction_id": reply.json()["id"], "reward": reward}).raise_for_status()
    return reply.headers["x-rollout-id"]


def test_rollouts_are_paged_and_filtered(http):
    made = [rewarded(http, reward) for reward in (0.1, 0.2, 0.3, 0.4, 0.5)][::-1]
    unrewarded = http.post("/v1/chat/completions", json=CHAT).headers["x-rollout-id"]
    newest = http.get("/admin/rollouts", params={"limit": 1}).json()
    assert [row["id"] for row in newest["data"]] == [unrewarded]
    seen, after = [], newest["next"]
    while len(seen) < 5:
        page = http.get("/admin/rollouts", params={"limit": 2, "after": after, "policy": "default"}).json()
        seen += page["data"]
        after = page["next"]
    assert [row["id"] for row in seen[:5]] == made
    assert [row["return"] for row in seen[:5]] == [0.5, 0.4, 0.3, 0.2, 0.1]
    assert all(row["versions"] == [0] and row["completion_tokens"] == 3 for row in seen)
    opened = http.get("/admin/rollouts", params={"state": "open"}).json()
    assert [row["id"] for row in opened["data"]] == [unrewarded]
    assert opened["next"] is None


def test_one_rollout_with_its_tokens(http):
    rollout = rewarded(http)
    whole = http.get(f"/admin/rollouts/{rollout}").json()
    (interaction,) = whole["interactions"]
    assert interaction["completion_ids"] == [10, 11, 12]
    assert interaction["logprobs"] == [-0.5, -0.5, -0.5]
    assert interaction["new_prompt_ids"][0] == 1
    assert interaction["sampling"]["temperature"] == 1.0
    assert json.loads(interaction["request"])["model"] == "default"
    assert json.loads(interaction["response"])["choices"][0]["message"]["content"] == "abc"
    assert whole["updates"] == []


def test_updates_and_versions(http, world: World):
    rollouts = {rewarded(http), rewarded(http)}
    with world.database.write() as session:
        claim = claim_update(session, world.policy_id, owner="test")
        assert isinstance(claim, Claim)
        done = UpdateDone(
            version=None,
            health={"explained_variance": 0.5},
            seconds={"policy": 1.5},
            provenance={"seed": 1},
            summaries={},
        )
        commit_update(session, claim.update_id, "test", done)
    (row,) = http.get("/admin/updates", params={"policy": "default"}).json()["data"]
    assert (row["id"], row["state"], row["version"]) == (str(claim.update_id), "done", None)
    assert row["health"] == {"explained_variance": 0.5}
    one = http.get(f"/admin/updates/{row['id']}").json()
    assert rollouts <= {each["rollout_id"] for each in one["rollouts"]}
    trained = http.get(f"/admin/rollouts/{next(iter(rollouts))}").json()
    assert trained["state"] == "trained"
    assert trained["updates"][0]["update_id"] == row["id"]
    late = http.post("/v1/feedback", json={"rollout_id": trained["id"], "reward": 0}).json()
    assert late["status"] == "late"

    (version,) = http.get("/admin/policies/default/versions").json()["data"]
    assert (version["number"], version["pinned"]) == (0, False)
    assert http.put("/admin/policies/default/versions/0", json={"pinned": True}).json()["pinned"] is True
    assert http.put("/admin/policies/default/versions/0", json={"pinned": False}).json()["pinned"] is False


def test_a_rejected_version_is_tried_again(http, world: World):
    retry = "/admin/policies/default/versions/0/retry"
    refused = http.post(retry)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_rejected")
    assert http.post("/admin/policies/default/versions/9/retry").status_code == 404
    with world.database.write() as session:
        session.query(PolicyVersion).one().status = "rejected"
    unpinnable = http.put("/admin/policies/default/versions/0", json={"pinned": True})
    assert (unpinnable.status_code, unpinnable.json()["error"]["code"]) == (409, "version_rejected")
    assert "versions/0/retry" in unpinnable.json()["error"]["message"]
    assert http.put("/admin/policies/default/versions/0", json={"pinned": False}).status_code == 200
    again = http.post(retry).json()
    assert (again["number"], again["status"], again["deploy_attempts"]) == (0, "candidate", 0)
    assert [event["kind"] for event in http.get("/admin/events").json()["data"]] == ["version_retried"]


def test_learning_is_switched(http, world: World):
    for on in (False, True):
        assert http.put("/admin/policies/default/learning", json={"on": on}).json()["learning"] is on
        assert http.get("/admin/policies/default").json()["learning"] is on


def test_settings_change_one_by_one(http):
    changed = http.patch("/admin/policies/default", json={"settings": {"policy_lr": 0.001}, "reward_max": 2}).json()
    assert changed["settings"]["policy_lr"] == 0.001
    assert changed["settings"]["min_rollouts"] == 2
    assert changed["reward_max"] == 2
    back = http.patch("/admin/policies/default", json={"settings": {"policy_lr": 0.0005}, "reward_max": 1}).json()
    assert (back["settings"]["policy_lr"], back["reward_max"]) == (0.0005, 1)


def test_a_setting_that_cannot_work_is_refused_with_what_would(http):
    refused = http.patch("/admin/policies/default", json={"settings": {"dis_band": [4.0, 0.2]}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "settings.dis_band"
    assert "must be [low, high] with 0 <= low < high, not [4, 0.2]" in refused.json()["error"]["message"]
    assert http.get("/admin/policies/default").json()["settings"]["dis_band"] == [0.2, 4.0]
    refused = http.patch("/admin/policies/default", json={"settings": {"advantage": "group", "group_size": 5}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "settings.group_size"
    assert "rollouts_per_update (32) must be a multiple of group_size (5)" in refused.json()["error"]["message"]
    assert http.get("/admin/policies/default").json()["settings"]["advantage"] == "value"


def test_a_setting_of_another_release_does_not_stand_in_the_way_of_a_change(http, world: World):
    with world.database.write() as session:
        policy = session.query(Policy).one()
        before = policy.settings
        policy.settings = {**before, "renamed_since": 1}
    changed = http.patch("/admin/policies/default", json={"settings": {"policy_lr": 0.001}})
    assert changed.json()["settings"] == {**before, "policy_lr": 0.001}
    http.patch("/admin/policies/default", json={"settings": {"policy_lr": before["policy_lr"]}}).raise_for_status()


def test_a_preset_replaces_what_it_sets(http):
    changed = http.patch("/admin/policies/default", json={"settings": {"preset": "paper"}}).json()["settings"]
    assert changed["preset"] == "paper"
    assert (changed["policy_steps"], changed["anchor_coefficient"], changed["whiten_advantages"]) == (1, 0.0, True)
    assert changed["centring"] == 0.0
    assert changed["min_rollouts"] == 2
    back = http.patch("/admin/policies/default", json={"settings": {"preset": "online"}}).json()["settings"]
    assert (back["policy_steps"], back["anchor_coefficient"], back["whiten_advantages"]) == (2, 0.02, False)


def test_a_new_policy_shares_the_base_model_and_is_prepared_later(http, world: World):
    made = http.post("/admin/policies", json={"name": "new", "settings": {"preset": "paper"}, "reward_max": 5})
    assert made.status_code == 201
    assert made.json()["base_model"] == http.get("/admin/policies/default").json()["base_model"]
    assert (made.json()["live"], made.json()["reward_max"]) == (None, 5)
    assert [policy["name"] for policy in http.get("/admin/policies").json()["data"]] == ["default", "new"]


def test_a_policy_of_full_weights_has_settings_of_its_own(http, world: World, tmp_path: Path):
    shared = http.post("/admin/policies", json={"name": "whole", "training": "full"})
    assert (shared.status_code, shared.json()["error"]["code"]) == (409, "base_model_not_shareable")
    own_base = shutil.copytree(http.get("/admin/policies/default").json()["base_model"], tmp_path / "base")
    refused = http.post(
        "/admin/policies",
        json={"name": "whole", "training": "full", "settings": {"policy_optimiser": "preconditioned"}},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "settings.policy_optimiser")
    whole = {"name": "whole", "training": "full", "base_model": str(own_base)}
    made = http.post("/admin/policies", json=whole)
    assert (made.status_code, made.json()["training"]) == (201, "full")
    assert (made.json()["settings"]["policy_lr"], made.json()["settings"]["policy_optimiser"]) == (1e-6, "adamw")
    paper = http.patch("/admin/policies/whole", json={"settings": {"preset": "paper"}}).json()["settings"]
    assert (paper["policy_lr"], paper["value_lr"], paper["policy_steps"]) == (1e-6, 5e-6, 1)
    for change in ({"settings": {"policy_optimiser": "preconditioned"}}, {"training": "lora"}):
        assert http.patch("/admin/policies/whole", json=change).status_code == 400
    assert http.post("/admin/policies", json={"name": "odd", "training": "dora"}).status_code == 400
    assert http.get("/admin/policies/default").json()["training"] == "lora"


def test_stats_say_why_the_learner_idles(http, world: World):
    rewarded(http)
    world.change_policy(idle_reason="too_few_rollouts: 1 ready, 2 needed")
    stats = http.get("/admin/stats").json()["policies"]["default"]
    assert stats["idle_reason"] == "too_few_rollouts: 1 ready, 2 needed"
    assert stats["rollouts"]["ready"] >= 1
    assert http.get("/admin/stats", params={"policy": "default"}).json()["policies"].keys() == {"default"}


def test_replicas_show_what_they_have_loaded(http, world: World, engine_server: Server):
    (replica,) = http.get("/admin/replicas").json()["data"]
    assert (replica["url"], replica["healthy"]) == (engine_server.url, True)
    assert [(each["version"], each["state"]) for each in replica["deployments"]] == [(0, "verified")]


def test_events_newest_first(http, world: World):
    with world.database.write() as session:
        for kind in ("first", "second"):
            add_event(session, kind, f"{kind} thing")
    page = http.get("/admin/events", params={"limit": 1}).json()
    assert [event["kind"] for event in page["data"]] == ["second"]
    rest = http.get("/admin/events", params={"after": page["next"]}).json()
    assert rest["data"][0]["kind"] == "first"


def test_only_the_hash_of_a_key_is_stored(world: World):
    with world.database.read() as session:
        stored = [list(row) for row in session.execute(select(ApiKey.__table__))]
    assert len(stored) >= len(world.secrets)
    assert not any(secret in str(stored) for secret in world.secrets.values())
    assert hashlib.sha256(world.secrets["all"].encode()).hexdigest() in str(stored)


def test_healthz_needs_nothing(world: World):
    with world.http(None) as http:
        assert http.get("/healthz").json() == {"status": "ok"}


def test_readyz_says_what_is_missing(world: World):
    with world.http(None) as http:
        assert http.get("/readyz").json() == {"status": "ok", "policies": ["default"]}
        world.set_replica(world.replica_id, healthy=False)
        reply = http.get("/readyz")
        assert reply.status_code == 503
        assert "no engine is healthy" in reply.json()["missing"]
        world.set_replica(world.replica_id, healthy=True)
        world.set_live(None)
        assert "no policy has a live version yet" in http.get("/readyz").json()["missing"]
        world.set_live(0)
        assert http.get("/readyz").status_code == 200


def test_a_writer_that_died_shows_in_both_and_is_503(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(world.app.state.service.writer, "_died", True)
    with world.http() as http:
        for path in ("/healthz", "/readyz"):
            reply = http.get(path)
            assert (reply.status_code, "restart" in reply.json()["missing"]) == (503, True)
        refused = http.post("/admin/keys", json={"name": "k", "scopes": ["inference"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")


def test_openapi_describes_the_bodies(world: World):
    with world.http(None) as http:
        paths = http.get("/openapi.json").json()["paths"]
    chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "temperature"} <= chat["properties"].keys()


def test_a_database_that_is_gone_is_503(tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch):
    world = found_world(tmp_path, base_model)
    with serving(world.app) as server:
        world.url = server.url
        with world.http() as http:
            http.get("/v1/models").raise_for_status()
            (tmp_path / "evergreen.db").write_bytes(b"")
            (tmp_path / "evergreen.db-wal").unlink(missing_ok=True)
            world.app.state.service.database._reading.dispose()
            reply = http.get("/v1/models")
            ready = http.get("/readyz")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
    assert ready.status_code == 503
