"""Requests that cannot be served: status and vLLM's error body."""

from typing import Any

import httpx
import pytest

from app.engine.client import InvalidForEngine, PromptTooLong, Sampling
from tests.contract.engines import RunningEngine
from tests.contract.test_completions import complete
from tests.contract.tiny_model import CONTEXT, VOCABULARY

GOOD: dict[str, Any] = {"model": "base", "prompt": [5, 6], "max_tokens": 1}


def post(engine: RunningEngine, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{engine.url}/v1/completions", json=body, trust_env=False)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 4 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_too_long(engine: RunningEngine, length: int) -> None:
    with pytest.raises(PromptTooLong):
        complete(engine, "base", [7] * length, Sampling(max_tokens=1))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0),
        Sampling(1, temperature=-0.1),
        Sampling(1, temperature=2.1),
        Sampling(1, top_p=0.0),
        Sampling(1, top_p=1.1),
        Sampling(1, top_k=-2),
        Sampling(1, stop=("",)),
        Sampling(1, stop=("a", "b", "c", "d", "e")),
        Sampling(1, stop_token_ids=(VOCABULARY,)),
        Sampling(1, seed=2**63),
        Sampling(CONTEXT + 1),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(engine: RunningEngine, sampling: Sampling) -> None:
    with pytest.raises(InvalidForEngine):
        complete(engine, "base", [5, 6, 7], sampling)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": [VOCABULARY]},
        {"prompt": [-1]},
        {"temperature": "warm"},
        {"logprobs": 21},
        {"logprobs": -2},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_bodies_that_make_no_sense_are_a_400_with_vllms_error(engine: RunningEngine, change: dict[str, Any]) -> None:
    response = post(engine, GOOD | change)
    assert response.status_code == httpx.codes.BAD_REQUEST
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == httpx.codes.BAD_REQUEST


def test_no_json_is_a_400(engine: RunningEngine) -> None:
    response = httpx.post(
        f"{engine.url}/v1/completions", content=b"{", headers={"content-type": "application/json"}, trust_env=False
    )
    assert response.status_code == httpx.codes.BAD_REQUEST


def test_an_unknown_model_is_a_404_that_says_so(engine: RunningEngine) -> None:
    response = post(engine, GOOD | {"model": "nobody"})
    assert response.status_code == httpx.codes.NOT_FOUND
    assert "does not exist" in response.json()["error"]["message"]


def test_neutral_and_unknown_fields_are_accepted(engine: RunningEngine) -> None:
    neutral = {"n": 1, "echo": False, "presence_penalty": 0, "top_k": -1, "logit_bias": None, "user": "x", "foo": 1}
    assert post(engine, GOOD | neutral).status_code == httpx.codes.OK


def test_text_prompts_usage_and_token_texts(engine: RunningEngine) -> None:
    body = GOOD | {"prompt": "the lazy dog", "logprobs": 2, "temperature": 0, "return_token_ids": True}
    answer = post(engine, body).json()
    choice = answer["choices"][0]
    count = len(choice["prompt_token_ids"])
    assert (
        answer["usage"] | {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1} == answer["usage"]
    )
    assert choice["logprobs"]["text_offset"] == [0]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2
    assert choice["logprobs"]["tokens"][0] in choice["logprobs"]["top_logprobs"][0]


def test_a_stream_ends_with_usage_and_done(engine: RunningEngine) -> None:
    body = GOOD | {"max_tokens": 3, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    events = post(engine, body).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert '"choices":[]' in events[-2]
    assert '"total_tokens":5' in events[-2]
