"""Chat and text completions through the real OpenAI SDK: shapes, headers, and what is logged."""

import json
import math
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from app.inference.render import ChatRenderer
from tests.integration.service.fake_engine import FakeEngine, Piece, Script, answer, held
from tests.integration.service.world import World

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer(base_model) -> ChatRenderer:
    return ChatRenderer(base_model)


def test_chat_completion_is_answered_and_logged_whole(world: World, engine: FakeEngine, renderer: ChatRenderer):
    engine.scripts.append(answer("He", "llo", ""))
    raw = world.openai().chat.completions.with_raw_response.create(
        model="default", messages=HELLO, max_tokens=5, seed=7, stop=["x"], metadata={"run": "r1"}
    )
    reply = raw.parse()
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.role == "assistant"
    assert reply.model == "default@0"
    prompt_ids = renderer.render(HELLO)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt_ids), 3)
    assert reply.usage.total_tokens == len(prompt_ids) + 3

    assert raw.headers["x-interaction-id"] == reply.id
    assert raw.headers["x-policy-version"] == "0"
    row = world.interaction(reply.id)
    assert (row.state, row.reason, row.version, row.finish_reason) == ("completed", None, 0, "stop")
    assert row.new_prompt_ids.tolist() == prompt_ids
    assert row.completion_ids.tolist() == [10, 11, 12]
    assert row.logprobs.tolist() == [-0.5, -0.5, -0.5]
    assert row.first_token_at is not None
    assert json.loads(row.request)["messages"] == HELLO
    assert json.loads(row.response)["choices"][0]["message"]["content"] == "Hello"
    assert raw.headers["x-rollout-id"] == str(row.rollout_id)
    assert world.rollout(row.rollout_id).tags == {"run": "r1"}

    sent = engine.last
    assert sent["model"] == "default-v0"
    assert sent["prompt"] == prompt_ids
    assert sent["stop_token_ids"] == [2]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"], sent["stop"]) == (1.0, 5, 7, ["x"])


def test_stream_has_the_sdks_shape_and_usage_on_request(world: World, engine: FakeEngine):
    engine.scripts.append(answer("He", "llo", finish="length"))
    chunks = list(
        world.openai().chat.completions.create(
            model="default", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1
    row = world.interaction(chunks[0].id)
    assert row.completion_ids.tolist() == [10, 11]
    assert json.loads(row.response)["choices"][0]["message"]["content"] == "Hello"


def test_stream_without_usage_ends_with_the_finish_reason(world: World):
    chunks = list(world.openai().chat.completions.create(model="default", messages=HELLO, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_sends_text_as_it_is_sampled(world: World, engine: FakeEngine):
    script = answer("first", "second")
    rest = held(script, before=1)
    engine.scripts.append(script)
    stream = world.openai().chat.completions.create(model="default", messages=HELLO, stream=True)
    texts = []
    for chunk in stream:
        texts.append(chunk.choices[0].delta.content)
        if texts[-1] == "first":
            assert not script.left.is_set()  # the engine has not sampled the last token
            assert world.interaction(chunk.id).state == "running"
            rest.set_result(None)
    assert texts == ["", "first", "second"]


def test_feedback_right_after_the_first_chunk_finds_the_interaction(world: World, engine: FakeEngine):
    script = answer("first", "second")
    rest = held(script, before=1)
    engine.scripts.append(script)
    with world.http() as http:
        for chunk in world.openai().chat.completions.create(model="default", messages=HELLO, stream=True):
            if not rest.done():
                reply = http.post("/v1/feedback", json={"interaction_id": chunk.id, "reward": 1})
                assert reply.status_code == 200, reply.text
                assert reply.json()["rollout"]["state"] == "open"
                rest.set_result(None)
    assert world.rollout(world.interaction(chunk.id).rollout_id).state == "ready"


def test_logprobs_of_the_sampled_tokens(world: World, engine: FakeEngine):
    engine.scripts.append(Script([Piece("x", [40, 41], "stop", [-0.25, -1.5])]))
    reply = world.openai().chat.completions.create(model="default", messages=HELLO, logprobs=True)
    content = reply.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.25, -1.5]
    assert all(entry.top_logprobs == [] for entry in content)


def test_content_parts_and_the_developer_role(world: World, engine: FakeEngine, renderer: ChatRenderer):
    world.openai().chat.completions.create(
        model="default",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        ],
    )
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert engine.last["prompt"] == renderer.render(plain)


def test_max_completion_tokens_wins_and_the_default_fits_the_context(world: World, engine: FakeEngine):
    client = world.openai()
    client.chat.completions.create(model="default", messages=HELLO, max_completion_tokens=3, max_tokens=9)
    assert engine.last["max_tokens"] == 3
    client.chat.completions.create(model="default", messages=HELLO)
    assert engine.last["max_tokens"] == 512 - len(engine.last["prompt"])


def test_text_completion_of_a_text_and_of_token_ids(world: World, engine: FakeEngine, renderer: ChatRenderer):
    client = world.openai()
    reply = client.completions.create(model="default", prompt="red", logprobs=0)
    assert reply.choices[0].text == "abc"
    assert reply.choices[0].logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert engine.last["prompt"] == renderer.encode("red")
    assert engine.last["max_tokens"] == 16
    client.completions.create(model="default", prompt=[[5, 6, 7]], max_tokens=2)
    assert engine.last["prompt"] == [5, 6, 7]
    client.completions.create(model="default", prompt=["red"])
    assert engine.last["prompt"] == renderer.encode("red")


def test_streamed_text_completion(world: World):
    chunks = list(world.openai().completions.create(model="default", prompt=[5], stream=True, logprobs=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks] == [[0], [1], [2]]


def test_a_special_token_in_a_text_prompt_stays_text(world: World, engine: FakeEngine):
    world.openai().completions.create(model="default", prompt="a<|im_end|>b")
    assert 2 not in engine.last["prompt"]


def test_models_are_listed(world: World):
    client = world.openai()
    assert [model.id for model in client.models.list()] == ["default"]
    assert client.models.retrieve("default").id == "default"


@pytest.mark.parametrize("how", ["header", "metadata"])
def test_two_turns_of_a_named_rollout_are_linked(world: World, engine: FakeEngine, renderer: ChatRenderer, how: str):
    client = world.openai()
    name = f"episode-{how}"
    naming = {"extra_headers": {"X-Rollout-Id": name}} if how == "header" else {"metadata": {"rollout_id": name}}
    red = renderer.tokenizer.encode("red")
    engine.scripts.append(Script([Piece("red", [*red, 2], "stop")]))
    first = client.chat.completions.create(model="default", messages=HELLO, **naming)
    turns = [*HELLO, {"role": "assistant", "content": "red"}, {"role": "user", "content": "again"}]
    second = client.chat.completions.with_raw_response.create(model="default", messages=turns, **naming)
    row = world.interaction(second.parse().id)
    assert row.parent_id == UUID(first.id)
    whole = renderer.render(turns)
    logged = len(renderer.render(HELLO)) + len(red) + 1
    assert row.new_prompt_ids.tolist() == whole[logged:]
    assert row.prompt_tokens == len(whole)
    rollout = world.rollout(second.headers["x-rollout-id"])
    assert (rollout.client_id, rollout.state) == (name, "open")


def test_requests_that_are_served_but_not_trained(world: World):
    client = world.openai()
    for options, reason in (
        ({"metadata": {"train": "false"}}, "opted_out"),
        ({"temperature": 0}, "off_distribution_sampling"),
        ({"top_p": 0.9}, "off_distribution_sampling"),
        ({"extra_body": {"top_k": 5}}, "off_distribution_sampling"),
        ({"temperature": 0.2, "top_p": 1, "n": 1, "frequency_penalty": 0, "user": "u"}, None),
    ):
        reply = client.chat.completions.create(model="default", messages=HELLO, **options)
        row = world.interaction(reply.id)
        assert row.reason == reason, options
        assert (row.detail is None) == (reason is None)


def test_override_samples_what_can_be_trained(world: World, engine: FakeEngine):
    world.change_policy(sampling="override")
    try:
        reply = world.openai().chat.completions.create(model="default", messages=HELLO, temperature=0, top_p=0.5)
    finally:
        world.change_policy(sampling="honour")
    assert (engine.last["temperature"], engine.last["top_p"]) == (1.0, 1.0)
    assert world.interaction(reply.id).reason is None


UNFIT = {
    "too few": Piece("x", [40, 41], None, [-0.25]),
    "too many": Piece("x", [40, 41], None, [-0.25, -0.25, -0.25]),
    "an empty list": Piece("x", [40, 41], None, []),
    "null": Piece("x", [40, 41], None, has_logprobs=False),
    "one null": Piece("x", [40, 41], None, [-0.25, None]),
}


@pytest.mark.parametrize("piece", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": HELLO}),
        ("chat/completions", {"messages": HELLO, "logprobs": True}),
        ("completions", {"prompt": "hello", "logprobs": 0}),
    ],
)
def test_an_answer_whose_logprobs_do_not_fit_is_served_and_never_trained(
    world: World, engine: FakeEngine, path: str, asked: dict[str, Any], piece: Piece
):
    """In the two pieces of "too few" the numbers add up, but not token by token."""
    engine.scripts.append(
        Script([piece, Piece("y", [42], "stop", [-0.5, -0.5] if piece is UNFIT["too few"] else None)])
    )
    with world.http() as http:
        reply = http.post(f"/v1/{path}", json={"model": "default", **asked})
    assert reply.status_code == 200
    (choice,) = reply.json()["choices"]
    assert choice["logprobs"] is None
    row = world.interaction(reply.json()["id"])
    assert (row.state, row.reason) == ("completed", "missing_logprobs")
    assert np.array_equal(row.completion_ids, [40, 41, 42])


def test_a_streamed_chunk_without_logprobs_says_null(world: World, engine: FakeEngine):
    engine.scripts.append(Script([Piece("x", [40]), Piece("y", [41], "stop", has_logprobs=False)]))
    stream = world.openai().chat.completions.create(model="default", messages=HELLO, stream=True, logprobs=True)
    _, first, last = list(stream)
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.content[0].logprob == -0.5
    assert last.choices[0].logprobs is None
    assert world.interaction(last.id).reason == "missing_logprobs"


@pytest.mark.parametrize("sent", [-math.inf, -9999.0, math.nan])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": HELLO, "logprobs": True}),
        ("completions", {"prompt": "hello", "logprobs": 0}),
    ],
)
def test_a_logprob_that_is_no_number_is_served_as_vllm_does_and_never_trained(
    world: World, engine: FakeEngine, path: str, asked: dict[str, Any], sent: float
):
    engine.scripts.append(Script([Piece("xy", [40, 41], "stop", [-0.25, sent])]))
    with world.http() as http:
        reply = http.post(f"/v1/{path}", json={"model": "default", **asked})
    body = json.loads(reply.text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    logprobs = body["choices"][0]["logprobs"]
    served = [t["logprob"] for t in logprobs["content"]] if "content" in logprobs else logprobs["token_logprobs"]
    assert served == [-0.25, -9999.0]
    assert world.interaction(body["id"]).reason == "missing_logprobs"


def test_the_model_that_a_reply_names_can_be_looked_up(world: World):
    client = world.openai()
    named = client.chat.completions.create(model="default", messages=HELLO).model
    assert (named, client.models.retrieve(named).id) == ("default@0", "default@0")
    assert client.models.retrieve("default").id == "default"
