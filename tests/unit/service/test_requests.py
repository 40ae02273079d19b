"""Request bodies: what is refused by name, and the values that ask for nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.inference.requests import (
    CHAT_NOT_SERVED,
    COMPLETION_NOT_SERVED,
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
)

Reader = Callable[[dict[str, Any]], ChatRequest | CompletionRequest]

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}


COMPLETION: dict[str, Any] = {"model": "default", "prompt": "hi"}
READERS = [(read_chat, CHAT, CHAT_NOT_SERVED), (read_completion, COMPLETION, COMPLETION_NOT_SERVED)]


@pytest.mark.parametrize(("read", "body", "not_served"), READERS)
def test_what_is_not_served_is_refused_by_name(read: Reader, body: dict[str, Any], not_served: dict[str, Any]):
    for name in not_served:
        with pytest.raises(InvalidRequest) as refused:
            read({**body, name: {"something": "else"}})
        assert refused.value.code == "unsupported_parameter"
        assert refused.value.param == name


@pytest.mark.parametrize(("read", "body", "not_served"), READERS)
def test_values_that_ask_for_nothing_are_ignored(read: Reader, body: dict[str, Any], not_served: dict[str, Any]):
    for name, neutral_values in not_served.items():
        for neutral in (None, *neutral_values):
            assert read({**body, name: neutral}).model == "default"


@pytest.mark.parametrize(
    ("read", "body", "name", "value"),
    [
        (read_completion, COMPLETION, "add_special_tokens", False),
        (read_chat, CHAT, "add_special_tokens", True),
        (read_chat, CHAT, "reasoning_effort", "high"),
        (read_chat, CHAT, "verbosity", "low"),
    ],
)
def test_fields_that_would_change_the_prompt_or_the_answer(read: Reader, body: dict[str, Any], name: str, value: Any):
    with pytest.raises(InvalidRequest) as refused:
        read({**body, name: value})
    assert refused.value.param == name


@pytest.mark.parametrize(("name", "value"), [("n", True), ("n", "1"), ("echo", 0), ("frequency_penalty", False)])
def test_a_neutral_value_has_its_own_type(name: str, value: Any):
    with pytest.raises(InvalidRequest):
        read_chat({**CHAT, name: value})


def test_numbers_are_neutral_whether_whole_or_not():
    assert read_chat({**CHAT, "n": 1.0, "presence_penalty": 0.0})


@pytest.mark.parametrize("harmless", ["store", "service_tier", "parallel_tool_calls", "safety_identifier", "x_unknown"])
def test_unknown_fields_are_ignored(harmless: str):
    assert read_chat({**CHAT, harmless: "anything"}).model == "default"


def test_null_is_absent():
    asked = read_chat({**CHAT, "temperature": None, "stop": None, "max_tokens": None, "metadata": None, "seed": None})
    assert asked.temperature is None
    assert asked.stops == ()


def test_max_completion_tokens_is_the_newer_name():
    assert read_chat({**CHAT, "max_tokens": 5, "max_completion_tokens": 3}).wanted_tokens == 3
    assert read_chat({**CHAT, "max_tokens": 5}).wanted_tokens == 5


def test_stop_is_one_text_or_several():
    assert read_chat({**CHAT, "stop": "a"}).stops == ("a",)
    assert read_chat({**CHAT, "stop": ["a", "b"]}).stops == ("a", "b")


def test_whole_numbers_are_temperatures():
    assert read_chat({**CHAT, "temperature": 1}).temperature == 1.0


def test_logprobs_of_completions():
    assert read_completion({"model": "m", "prompt": "a", "logprobs": 0}).logprobs == 0
    with pytest.raises(InvalidRequest, match="send 0"):
        read_completion({"model": "m", "prompt": "a", "logprobs": 1})
