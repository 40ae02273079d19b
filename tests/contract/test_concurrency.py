"""Requests next to each other: joining, leaving, overload."""

import asyncio
import time

import pytest

from app.engine.client import EngineClient, EngineOverloaded, Sampling
from tests.contract.engines import MAX_NUM_SEQS, MAX_QUEUED, RunningEngine
from tests.contract.test_completions import complete, with_client

LONG = Sampling(max_tokens=240, seed=1)
PROMPT = [5, 6, 7]


def wait_until_idle(engine: RunningEngine) -> None:
    deadline = time.monotonic() + 20
    while engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting") > 0:
        assert time.monotonic() < deadline, "requests are still there"
        time.sleep(0.02)


def test_a_request_joins_and_two_adapters_run_at_once(engine: RunningEngine) -> None:
    """The second, under another adapter, answers fully while the first is still streaming."""

    async def body(client: EngineClient) -> list[str]:
        order: list[str] = []
        first = client.stream(engine.url, "one", PROMPT, long_sampling)
        await anext(first)
        done = await client.complete(engine.url, "two", PROMPT, Sampling(max_tokens=3, seed=2))
        order.append(f"second {len(done.token_ids)}")
        rest = [delta async for delta in first]
        order.append(f"first {rest[-1].finish_reason}")
        return order

    long_sampling = endless(engine, "one")
    assert with_client(body) == ["second 3", "first length"]


def endless(engine: RunningEngine, model: str) -> Sampling:
    """A seed under which the model runs to its token limit."""
    for seed in range(100):
        sampling = Sampling(max_tokens=240, seed=seed)
        if complete(engine, model, PROMPT, sampling).finish_reason == "length":
            return sampling
    raise AssertionError("every seed ended early")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_frees_the_slot(engine: RunningEngine, streamed: bool) -> None:
    """Streaming or not, running or waiting: what nobody will read is not generated."""
    sampling = endless(engine, "one")
    calls = MAX_NUM_SEQS + 4
    wait_until_idle(engine)
    before = engine.metric("vllm:generation_tokens_total")

    async def body(client: EngineClient) -> None:
        if streamed:
            streams = [client.stream(engine.url, "one", PROMPT, sampling) for _ in range(calls)]
            first = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            for task in first:
                task.cancel()
            await asyncio.wait(first)
            await asyncio.gather(*(stream.aclose() for stream in streams))
            return
        tasks = [asyncio.create_task(client.complete(engine.url, "one", PROMPT, sampling)) for _ in range(calls)]
        while await asyncio.to_thread(engine.metric, "vllm:num_requests_running") == 0:
            assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    with_client(body)
    wait_until_idle(engine)
    assert engine.metric("vllm:generation_tokens_total") - before < calls * sampling.max_tokens / 2


def test_a_full_queue_is_overload_and_passes(engine: RunningEngine) -> None:
    async def body(client: EngineClient) -> list[object]:
        calls = (client.complete(engine.url, "one", PROMPT, LONG) for _ in range(4 * (MAX_NUM_SEQS + MAX_QUEUED)))
        return await asyncio.gather(*calls, return_exceptions=True)

    results = with_client(body)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused
    assert all(isinstance(result, EngineOverloaded) for result in refused)
    assert len(results) - len(refused) >= MAX_NUM_SEQS
    assert complete(engine, "one", PROMPT, Sampling(max_tokens=2)).token_ids
