"""New weights under running requests: pause, reload from disk, label, resume.

vLLM's endpoints for it need VLLM_SERVER_DEV_MODE=1. Which weights sampled a token is told by vLLM 0.33 and newer; no
full policy is deployed to an older one, and it is not asked to swap here.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine.client import Delta, EngineClient, Sampling
from app.engine.control_client import ControlClient
from app.engine.errors import EngineError, EngineOverloaded, WeightsRejected
from tests.contract.conftest import ModelFiles
from tests.contract.engines import RunningEngine, start
from tests.contract.reference import WholeModels
from tests.contract.test_completions import PROMPTS, TOLERANCE, complete, with_client
from tests.contract.test_concurrency import Endless
from tests.contract.tiny_model import perturbed_model

PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def versions(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    return {"p-v0": files.base} | {f"p-v{n}": perturbed_model(files.base, root / f"v{n}", seed=n) for n in (1, 2)}


@pytest.fixture(scope="module")
def models(versions: dict[str, Path]) -> WholeModels:
    return WholeModels(versions)


@pytest.fixture(scope="module")
def swapped(
    engine: RunningEngine, files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """An engine of its own: others' tests want the base model's weights."""
    with start(engine.kind, files.base, tmp_path_factory.mktemp("logs") / "swapped.log") as running:
        yield running


@pytest.fixture
def weights(swapped: RunningEngine, control: ControlClient, versions: dict[str, Path]) -> Iterator[None]:
    """Version 0 is served, and nothing is paused, before and after. An engine that no full policy is deployed to, since
    it does not say which weights sampled a token, is not asked to swap: vLLM 0.32 on a CPU answers with wrong log-probs
    after a reload."""
    needs_spans(swapped, control)
    swap(control, swapped, versions, "p-v0")
    yield
    swap(control, swapped, versions, "p-v0")


def swap(control: ControlClient, engine: RunningEngine, versions: dict[str, Path], name: str) -> None:
    control.pause(engine.url)
    control.reload_weights(engine.url, str(versions[name]))
    control.label_weights(engine.url, name)
    control.resume(engine.url)


def needs_spans(engine: RunningEngine, control: ControlClient) -> None:
    if control.sampled_by(engine.url, [5]) is None:
        pytest.skip("this vLLM does not say which weights sampled a token: 0.33 and newer do")


def test_a_fresh_engine_says_that_it_was_never_told(swapped: RunningEngine, control: ControlClient) -> None:
    """It must run first: the label is how control knows an engine that was restarted."""
    assert control.weight_label(swapped.url) == "default"
    assert not control.is_paused(swapped.url)


@pytest.mark.usefixtures("weights")
def test_reloaded_weights_are_served_and_labelled(
    swapped: RunningEngine, control: ControlClient, versions: dict[str, Path], models: WholeModels
) -> None:
    """The same prompts before and after: nothing that the old weights computed is used again."""
    for name in ("p-v1", "p-v2", "p-v1"):
        swap(control, swapped, versions, name)
        assert control.weight_label(swapped.url) == name
        for prompt in (PROMPT, PROMPT, PROMPTS[1]):
            done = complete(swapped, "base", prompt, Sampling(max_tokens=6, seed=1))
            assert done.logprobs == pytest.approx(models.logprobs(name, prompt, done.token_ids), abs=TOLERANCE)


@pytest.mark.usefixtures("weights")
def test_pausing_and_resuming_twice_is_once(swapped: RunningEngine, control: ControlClient) -> None:
    for _ in range(2):
        control.pause(swapped.url)
        assert control.is_paused(swapped.url)
    for _ in range(2):
        control.resume(swapped.url)
        assert not control.is_paused(swapped.url)
    assert complete(swapped, "base", PROMPT, Sampling(max_tokens=2)).token_ids


@pytest.mark.usefixtures("weights")
def test_a_completion_that_spans_a_swap(
    swapped: RunningEngine, control: ControlClient, versions: dict[str, Path], models: WholeModels
) -> None:
    """Nothing comes while it is paused. Each token's log-prob is that of its weights on the whole context."""
    total = 200

    async def read_until_silent(stream: Any) -> list[Delta]:
        """What was on its way when the engine paused; the next one is left in `awaited`."""
        read: list[Delta] = []
        while True:
            pending = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({pending}, timeout=1.0)
            if not done:
                awaited.append(pending)
                return read
            read.append(pending.result())

    awaited: list[asyncio.Future[Delta]] = []

    async def body(client: EngineClient) -> tuple[list[Delta], int]:
        stream = client.stream(swapped.url, None, PROMPT, Endless(max_tokens=total, seed=3))
        deltas = [await anext(stream) for _ in range(3)]
        await asyncio.to_thread(control.pause, swapped.url)
        deltas += await read_until_silent(stream)
        at = sum(len(delta.token_ids) for delta in deltas)
        await asyncio.to_thread(control.reload_weights, swapped.url, str(versions["p-v1"]))
        await asyncio.to_thread(control.label_weights, swapped.url, "p-v1")
        await asyncio.to_thread(control.resume, swapped.url)
        deltas.append(await awaited[0])
        deltas += [delta async for delta in stream]
        return deltas, at

    deltas, at = with_client(body)
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert 3 <= at < total == len(ids)
    expected = models.logprobs("p-v0", PROMPT, ids)[:at] + models.logprobs("p-v1", PROMPT, ids)[at:]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    spans = deltas[-1].weight_spans
    assert spans is not None
    assert [(span.label, span.count) for span in spans] == [("p-v0", at), ("p-v1", total - at)]
    assert all(delta.weight_spans is None for delta in deltas[:-1])


@pytest.mark.usefixtures("weights")
def test_a_whole_answer_says_whose_it_is(swapped: RunningEngine, control: ControlClient) -> None:
    assert control.sampled_by(swapped.url, [5]) == "p-v0"
    control.label_weights(swapped.url, "another")
    assert control.sampled_by(swapped.url, [5]) == "another"


@pytest.mark.usefixtures("weights")
def test_a_request_that_comes_during_a_pause_waits_or_is_refused_and_is_never_answered_by_the_old_weights(
    swapped: RunningEngine, control: ControlClient, versions: dict[str, Path], models: WholeModels
) -> None:
    async def body(client: EngineClient) -> object:
        await asyncio.to_thread(control.pause, swapped.url)
        call = asyncio.ensure_future(client.complete(swapped.url, "base", PROMPT, Sampling(max_tokens=4, seed=1)))
        await asyncio.wait({call}, timeout=1.0)
        refused = call.done()
        await asyncio.to_thread(control.reload_weights, swapped.url, str(versions["p-v2"]))
        await asyncio.to_thread(control.label_weights, swapped.url, "p-v2")
        await asyncio.to_thread(control.resume, swapped.url)
        (result,) = await asyncio.gather(call, return_exceptions=True)
        assert refused == isinstance(result, EngineOverloaded)
        return result

    result = with_client(body)
    if not isinstance(result, EngineOverloaded):
        assert not isinstance(result, BaseException)
        expected = models.logprobs("p-v2", PROMPT, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.usefixtures("weights")
def test_weights_that_cannot_be_loaded_are_refused(
    swapped: RunningEngine, control: ControlClient, tmp_path: Path
) -> None:
    control.pause(swapped.url)
    with pytest.raises(WeightsRejected):
        control.reload_weights(swapped.url, str(tmp_path / "nothing"))
    assert control.is_paused(swapped.url)


def test_the_embedded_engine_refuses_by_name_what_it_lacks(swapped: RunningEngine, tmp_path: Path) -> None:
    if swapped.kind != "embedded":
        pytest.skip("vLLM has these")
    with httpx.Client(base_url=swapped.url, trust_env=False) as http:
        assert http.post("/pause").status_code == 400, "vLLM's default ends all requests"
        assert http.post("/pause", params={"mode": "wait"}).status_code == 400
        assert http.post("/collective_rpc", json={"method": "sleep"}).status_code == 400
        assert http.post("/collective_rpc", json={"method": "reload_weights"}).status_code == 400
        assert http.post("/update_weight_version", json={"weight_version": "x"}).status_code == 400
        assert http.get("/is_paused").json() == {"is_paused": False}


def test_an_engine_without_these_endpoints_is_told_apart(control: ControlClient) -> None:
    """A vLLM without VLLM_SERVER_DEV_MODE answers 404; here, one that is not there at all."""
    with pytest.raises(EngineError):
        control.weight_label("http://127.0.0.1:9")
