"""Bad input: each a 4xx with an OpenAI-shaped error that names what is wrong and says what to do."""

import json
from typing import Any

import pytest

from tests.integration.service.fake_engine import FakeEngine
from tests.integration.service.world import World

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "default", "messages": HELLO}
UNKNOWN = "01890000-0000-7000-8000-000000000000"


def chat(**changes: Any) -> dict[str, Any]:
    return {**CHAT, **changes}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CHAT_ERRORS = [
    # body, status, code, words of the message
    (chat(model="nobody"), 404, "model_not_found", "GET /v1/models"),
    (chat(model="default@7"), 404, "version_not_loaded", "live version is 0"),
    (chat(model="default@x"), 404, "model_not_found", "NAME@NUMBER"),
    (chat(model="default@99999999999999999999"), 404, "model_not_found", "NAME@NUMBER"),
    (chat(model="a b"), 404, "model_not_found", "GET /v1/models"),
    (chat(model=7), 400, "invalid_value", "'model'"),
    ({"messages": HELLO}, 400, "missing_field", "'model' is missing: add it"),
    ({"model": "default"}, 400, "missing_field", "'messages' is missing: add it"),
    (chat(messages=[]), 400, "invalid_value", "at least 1 item"),
    (chat(messages="hello"), 400, "invalid_value", "'messages'"),
    (chat(messages=["hello"]), 400, "invalid_value", "messages[0]"),
    (chat(messages=[{"content": "x"}]), 400, "invalid_value", "messages[0].role"),
    (chat(messages=[{"role": "god", "content": "x"}]), 400, "invalid_value", "use one of system, developer"),
    (chat(messages=[{"role": "user"}]), 400, "missing_field", "messages[0].content"),
    (chat(messages=user(5)), 400, "invalid_value", "text or a list of text parts"),
    (chat(messages=user(["x"])), 400, "invalid_value", "messages[0].content[0]"),
    (chat(messages=user([{"type": "text"}])), 400, "invalid_value", "messages[0].content[0].text"),
    (
        chat(messages=user([{"type": "image_url", "image_url": {"url": "http://x"}}])),
        400,
        "unsupported_content",
        "'image_url': this policy takes text parts only",
    ),
    (
        chat(messages=[*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]),
        400,
        "unsupported_content",
        "tools",
    ),
    (chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), 400, "unsupported_content", "tools"),
    (chat(tools=[{"type": "function"}]), 400, "unsupported_parameter", "tools are not served by this policy yet"),
    (chat(n=2), 400, "unsupported_parameter", "one request per completion"),
    (chat(n=True), 400, "unsupported_parameter", "'n'"),
    (chat(logit_bias={"5": 1}), 400, "unsupported_parameter", "'logit_bias' is not served: leave it out"),
    (chat(frequency_penalty=0.5), 400, "unsupported_parameter", "'frequency_penalty'"),
    (chat(presence_penalty=-1), 400, "unsupported_parameter", "'presence_penalty'"),
    (chat(response_format={"type": "json_object"}), 400, "unsupported_parameter", "'response_format'"),
    (chat(audio={"voice": "x"}, modalities=["audio"]), 400, "unsupported_parameter", "leave it out"),
    (chat(top_logprobs=3, logprobs=True), 400, "unsupported_parameter", "'logprobs': true"),
    (chat(functions=[{"name": "f"}]), 400, "unsupported_parameter", "tools"),
    (chat(temperature=2.1), 400, "invalid_value", "less than or equal to 2"),
    (chat(temperature=-0.1), 400, "invalid_value", "greater than or equal to 0"),
    (chat(temperature="hot"), 400, "invalid_value", "'temperature'"),
    (chat(temperature="1"), 400, "invalid_value", "'temperature'"),
    (chat(top_p=0), 400, "invalid_value", "'top_p'"),
    (chat(top_p=1.5), 400, "invalid_value", "'top_p'"),
    (chat(max_tokens=0), 400, "invalid_value", "'max_tokens'"),
    (chat(max_tokens=1.5), 400, "invalid_value", "'max_tokens'"),
    (chat(max_tokens=10**30), 400, "invalid_number", "'max_tokens' is too large a number"),
    (chat(seed=2**63), 400, "invalid_value", "'seed'"),
    (chat(stop=["a"] * 5), 400, "invalid_value", "at most 4 stop texts"),
    (chat(stop=""), 400, "invalid_value", "'stop'"),
    (chat(stream="yes"), 400, "invalid_value", "'stream'"),
    (chat(stream_options={"include_usage": True}), 400, "invalid_value", "'stream_options' goes with 'stream': true"),
    (chat(metadata={"a": 5}), 400, "invalid_value", "'metadata.a"),
    (chat(metadata={"train": "maybe"}), 400, "invalid_value", "'metadata.train' must be true or false"),
    (chat(metadata={"rollout_id": "a b"}), 400, "invalid_rollout_id", "1 to 128 letters"),
    (chat(metadata={"rollout_id": ""}), 400, "invalid_rollout_id", "1 to 128 letters"),
    (chat(metadata={f"k{i}": "x" for i in range(17)}), 400, "invalid_value", "'metadata'"),
    (chat(messages=user("long " * 600)), 400, "context_length_exceeded", "512"),
    (chat(max_tokens=512), 400, "context_length_exceeded", "ask for at most"),
]


@pytest.mark.parametrize(("body", "status", "code", "words"), CHAT_ERRORS, ids=lambda value: None)
def test_chat(world: World, engine: FakeEngine, body: dict[str, Any], status: int, code: str, words: str):
    served = len(engine.bodies)
    with world.http() as http:
        reply = http.post("/v1/chat/completions", json=body)
    check(reply, status, code, words)
    assert len(engine.bodies) == served


COMPLETION_ERRORS = [
    ({}, 400, "missing_field", "'prompt'"),
    ({"prompt": ""}, 400, "empty_prompt", "at least one token"),
    ({"prompt": []}, 400, "empty_prompt", "at least one token"),
    ({"prompt": ["a", "b"]}, 400, "unsupported_parameter", "One prompt per request"),
    ({"prompt": [[1], [2]]}, 400, "unsupported_parameter", "One prompt per request"),
    ({"prompt": [1, -1]}, 400, "invalid_value", "'prompt[1]'"),
    ({"prompt": [1, 10**6]}, 400, "invalid_value", "integers from 0 to"),
    ({"prompt": [1, True]}, 400, "invalid_value", "'prompt[1]'"),
    ({"prompt": [1, None]}, 400, "invalid_value", "'prompt[1]'"),
    ({"prompt": {"a": 1}}, 400, "invalid_value", "'prompt'"),
    ({"prompt": "a", "logprobs": 2}, 400, "unsupported_parameter", "send 0"),
    ({"prompt": "a", "echo": True}, 400, "unsupported_parameter", "'echo'"),
    ({"prompt": "a", "suffix": "b"}, 400, "unsupported_parameter", "'suffix'"),
    ({"prompt": "a", "best_of": 3}, 400, "unsupported_parameter", "'best_of'"),
    ({"prompt": [1] * 512}, 400, "context_length_exceeded", "The prompt has 512 tokens"),
]


@pytest.mark.parametrize(("body", "status", "code", "words"), COMPLETION_ERRORS, ids=lambda value: None)
def test_completions(world: World, body: dict[str, Any], status: int, code: str, words: str):
    with world.http() as http:
        check(http.post("/v1/completions", json={"model": "default", **body}), status, code, words)


FEEDBACK_ERRORS = [
    ({"reward": 1}, 400, "target_missing", "interaction_id or rollout_id"),
    ({"interaction_id": UNKNOWN, "reward": 1}, 404, "interaction_not_found", "X-Interaction-Id"),
    ({"interaction_id": "nonsense", "reward": 1}, 404, "interaction_not_found", "X-Interaction-Id"),
    ({"rollout_id": UNKNOWN, "reward": 1}, 404, "rollout_not_found", "X-Rollout-Id"),
    ({"rollout_id": "no-such-name", "reward": 1}, 404, "rollout_not_found", "X-Rollout-Id"),
    ({"rollout_id": "a b", "reward": 1}, 400, "invalid_value", "'rollout_id'"),
    ({"rollout_id": "r"}, 400, "reward_missing", "give a reward"),
    ({"rollout_id": "r", "reward": 1.5}, 400, "reward_out_of_range", "[-1.0, 1.0]"),
    ({"rollout_id": "r", "reward": "1"}, 400, "invalid_value", "'reward'"),
    ({"rollout_id": "r", "reward": True}, 400, "invalid_value", "'reward'"),
    ({"rollout_id": "r", "reward": 1, "metric": "a b"}, 400, "invalid_value", "'metric'"),
    ({"rollout_id": "r", "reward": 1, "final": "yes"}, 400, "invalid_value", "'final'"),
    ({"rollout_id": "r", "reward": 1, "outcome": "x" * 33}, 400, "invalid_value", "'outcome'"),
    ({"rollout_id": "r", "reward": 1, "idempotency_key": ""}, 400, "invalid_value", "'idempotency_key'"),
    ({"rollout_id": "r", "reward": 1, "idempotencyKey": "k"}, 400, "unknown_field", "use one of interaction_id, "),
]


@pytest.mark.parametrize(("body", "status", "code", "words"), FEEDBACK_ERRORS, ids=lambda value: None)
def test_feedback(world: World, body: dict[str, Any], status: int, code: str, words: str):
    with world.http() as http:
        http.post("/v1/chat/completions", json=CHAT, headers={"X-Rollout-Id": "r"}).raise_for_status()
        check(http.post("/v1/feedback", json=body), status, code, words)


BODIES = [
    (b"", "invalid_json", "send one JSON object"),
    (b"hello", "invalid_json", "send one JSON object"),
    (b"{", "invalid_json", "send one JSON object"),
    (b"[]", "invalid_json", "send a JSON object"),
    (b"null", "invalid_json", "send a JSON object"),
    (b'{"a": "\xff"}', "invalid_json", "UTF-8"),
    (b'{"model": "\\ud800"}', "invalid_text", "lone surrogate"),
    (b'{"model": "\xed\xa0\x80"}', "invalid_text", "lone surrogate"),
    (b'{"model": "a\\u0000"}', "invalid_text", "NUL"),
    (b'{"metadata": {"k\\u0000": "v"}}', "invalid_text", "remove or replace"),
    (b'{"metadata": {"k": "\\udc00"}}', "invalid_text", "'metadata.k'"),
    (b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', "invalid_text", "'messages[0].content'"),
    (b'{"messages": [{"role": "user", "content": [{"text": "\\ud83d"}]}]}', "invalid_text", "content[0].text"),
    (b'{"comment": "\\u0000", "rollout_id": "r", "reward": 1}', "invalid_text", "'comment'"),
    (b'{"reward": NaN}', "invalid_number", "finite number"),
    (b'{"reward": Infinity}', "invalid_number", "finite number"),
    (b'{"reward": -Infinity}', "invalid_number", "finite number"),
    (b'{"reward": 1e999}', "invalid_number", "too large"),
    (b'{"reward": ' + b"9" * 400 + b"}", "invalid_number", "too large"),
    (b'{"reward": ' + b"9" * 5000 + b"}", "invalid_json", "number out of range"),
    (b'\xef\xbb\xbf{"model": "default"}', "invalid_json", "without a byte order mark"),
    ('{"model": "default"}'.encode("utf-16"), "invalid_json", "UTF-8 without"),
    (b"[" * 100_000, "invalid_json", "JSON"),
    (b'{"a":' * 500 + b"1" + b"}" * 500, "invalid_json", "flatter"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/feedback", "/admin/keys"])
@pytest.mark.parametrize(("body", "code", "words"), BODIES, ids=lambda value: None)
def test_bodies(world: World, path: str, body: bytes, code: str, words: str):
    with world.http() as http:
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    check(reply, 400, code, words)


def test_a_body_that_is_no_json_by_its_type(world: World):
    with world.http() as http:
        reply = http.post("/v1/chat/completions", data={"model": "default"})
    check(reply, 415, "unsupported_media_type", "'Content-Type: application/json'")


def test_a_body_that_is_too_large(world: World):
    with world.http() as http:
        reply = http.post("/v1/chat/completions", json=chat(messages=user("x" * (17 * 2**20))))
    check(reply, 413, "body_too_large", "send less")


def test_a_prompt_longer_than_the_context_names_both_numbers(world: World):
    with world.http() as http:
        reply = http.post("/v1/completions", json={"model": "default", "prompt": [1] * 700})
    check(reply, 400, "context_length_exceeded", "700 tokens")
    assert "512" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a b", "x" * 129, "é", "a/b"])
def test_a_rollout_header_that_is_no_name(world: World, name: str):
    with world.http() as http:
        reply = http.post("/v1/chat/completions", json=CHAT, headers={"X-Rollout-Id": name.encode()})
    check(reply, 400, "invalid_rollout_id", "1 to 128 letters")


def test_header_and_metadata_that_disagree(world: World):
    with world.http() as http:
        reply = http.post(
            "/v1/chat/completions", json=chat(metadata={"rollout_id": "a"}), headers={"X-Rollout-Id": "b"}
        )
    check(reply, 400, "rollout_id_conflict", "send one of them")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/rollouts/unknown", 404, "rollout_not_found"),
        ("GET", f"/v1/rollouts/{UNKNOWN}", 404, "rollout_not_found"),
        ("GET", "/v1/rollouts/a%00b", 400, "invalid_rollout_id"),
        ("GET", "/v1/rollouts/%ED%A0%80", 400, "invalid_rollout_id"),
        ("POST", "/v1/rollouts/unknown/close", 404, "rollout_not_found"),
        ("POST", "/v1/rollouts/a%20b/close", 400, "invalid_rollout_id"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/v1/models/a%00b", 404, "model_not_found"),
        ("GET", "/v1/models/default@7", 404, "version_not_loaded"),
        ("GET", "/v1/models/nobody@0", 404, "model_not_found"),
        ("GET", "/v1/models/default@x", 404, "model_not_found"),
        ("GET", "/nowhere", 404, "unknown_path"),
        ("GET", "/v1/nowhere%00", 404, "unknown_path"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/feedback", 405, "method_not_allowed"),
        ("GET", "/admin/rollouts?limit=0", 400, "invalid_value"),
        ("GET", "/admin/rollouts?limit=x", 400, "invalid_value"),
        ("GET", "/admin/rollouts?limit=1001", 400, "invalid_value"),
        ("GET", "/admin/rollouts?state=nice", 400, "invalid_value"),
        ("GET", "/admin/rollouts?after=x", 400, "invalid_value"),
        ("GET", "/admin/rollouts?policy=nobody", 404, "model_not_found"),
        ("GET", "/admin/rollouts?policy=a%00", 404, "model_not_found"),
        ("GET", "/admin/rollouts?client_id=a%00", 400, "invalid_value"),
        ("GET", f"/admin/rollouts/{UNKNOWN}", 404, "rollout_not_found"),
        ("GET", "/admin/updates/x", 400, "invalid_value"),
        ("GET", f"/admin/updates/{UNKNOWN}", 404, "update_not_found"),
        ("GET", "/admin/policies/nobody", 404, "model_not_found"),
        ("GET", "/admin/policies/nobody/versions", 404, "model_not_found"),
        ("GET", "/admin/policies/default/versions?before=99999999999999999999", 400, "invalid_value"),
        ("DELETE", f"/admin/keys/{UNKNOWN}", 404, "key_not_found"),
        ("DELETE", "/admin/keys/x", 400, "invalid_value"),
    ],
)
def test_paths_and_queries(world: World, method: str, path: str, status: int, code: str):
    with world.http() as http:
        check(http.request(method, path), status, code, "")


ADMIN_ERRORS = [
    ("PUT", "/admin/policies/default/learning", {}, 400, "missing_field"),
    ("PUT", "/admin/policies/default/learning", {"on": "yes"}, 400, "invalid_value"),
    ("PUT", "/admin/policies/nobody/learning", {"on": True}, 404, "model_not_found"),
    ("PUT", "/admin/policies/default/versions/9", {"pinned": True}, 404, "version_not_found"),
    ("PUT", "/admin/policies/default/versions/99999999999999999999", {"pinned": True}, 400, "invalid_value"),
    ("PUT", "/admin/policies/default/versions/x", {"pinned": True}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"policy_lr": -1}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"policy_lr": 2}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"dis_band": [4.0, 0.2]}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"dis_band": [-0.5, 4.0]}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"dis_band": [1.0, 1.0]}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"seed": 2**63}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"seed": -1}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"rollouts_per_update": 2**31}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"rollouts_per_update": 10_001}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"learning": False}, 400, "unknown_field"),
    ("PATCH", "/admin/policies/default", {"max_staleness": 8}, 400, "unknown_field"),
    ("PATCH", "/admin/policies/default", {"settings": {"min_rollouts_after_wait": 0}}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"settings": {"no_such": 1}}, 400, "unknown_field"),
    ("PATCH", "/admin/policies/default", {"settings": {"lora_rank": 8}}, 409, "setting_fixed"),
    ("PATCH", "/admin/policies/default", {"sampling": "wild"}, 400, "invalid_value"),
    ("PATCH", "/admin/policies/default", {"reward_min": 2}, 400, "invalid_reward_range"),
    ("POST", "/admin/policies", {"name": "a b"}, 400, "invalid_name"),
    ("POST", "/admin/policies", {"name": "default"}, 409, "policy_exists"),
    ("POST", "/admin/policies", {"name": "p", "base_model": "/no/such/dir"}, 400, "invalid_value"),
    ("POST", "/admin/policies", {"name": "p", "base_model": "a" * 300}, 400, "invalid_value"),
    ("POST", "/admin/policies", {"name": "p", "base_model": "/dev/null"}, 400, "invalid_value"),
    ("POST", "/admin/policies", {"name": "p", "base_model": ""}, 400, "invalid_value"),
    ("POST", "/admin/keys", {"name": "k", "scopes": []}, 400, "invalid_scopes"),
    ("POST", "/admin/keys", {"name": "k", "scopes": ["root"]}, 400, "invalid_scopes"),
    ("POST", "/admin/keys", {"name": "k", "scopes": ["feedback"], "policy": "nobody"}, 404, "model_not_found"),
    ("POST", "/admin/keys", {"name": "k", "scopes": ["feedback", "admin"], "policy": "default"}, 400, "invalid_scopes"),
    ("POST", "/admin/keys", {"scopes": ["admin"]}, 400, "missing_field"),
    ("POST", "/admin/keys", {"name": "k", "scopes": ["inference"], "policy_id": UNKNOWN}, 400, "unknown_field"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), ADMIN_ERRORS)
def test_admin(world: World, method: str, path: str, body: dict[str, Any], status: int, code: str):
    with world.http() as http:
        check(http.request(method, path, json=body), status, code, "")


def check(reply: Any, status: int, code: str, words: str) -> None:
    assert reply.status_code == status, reply.text
    error = json.loads(reply.content)["error"]
    assert error["code"] == code, error
    assert words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 15
