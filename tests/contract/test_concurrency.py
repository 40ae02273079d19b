"""Requests next to each other: joining, leaving, overload."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from app.engine.client import EngineClient, EngineOverloaded, Sampling
from tests.contract.engines import MAX_NUM_SEQS, MAX_QUEUED, RunningEngine
from tests.contract.test_completions import collect, complete, with_client

PROMPT = [5, 6, 7]


@dataclass(frozen=True)
class Endless(Sampling):
    """Runs to its token limit, whatever it samples."""

    def body(self, model: str | None, prompt_ids: Sequence[int], *, stream: bool) -> dict[str, Any]:
        return super().body(model, prompt_ids, stream=stream) | {"ignore_eos": True}


LONG = Endless(max_tokens=240)


def wait_until_idle(engine: RunningEngine) -> None:
    deadline = time.monotonic() + 20
    while engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting") > 0:
        assert time.monotonic() < deadline, "requests are still there"
        time.sleep(0.02)


def test_a_request_joins_and_two_adapters_run_at_once(engine: RunningEngine) -> None:
    """The second, under another adapter, answers fully while the first is still streaming."""

    async def body(client: EngineClient) -> list[str]:
        order: list[str] = []
        first = client.stream(engine.url, "one", PROMPT, LONG)
        await anext(first)
        done = await client.complete(engine.url, "two", PROMPT, Sampling(max_tokens=3, seed=2))
        order.append(f"second {len(done.token_ids)}")
        rest = [delta async for delta in first]
        order.append(f"first {rest[-1].finish_reason}")
        return order

    assert with_client(body) == ["second 3", "first length"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_frees_the_slot(engine: RunningEngine, streamed: bool) -> None:
    """What nobody will read is not generated: all clients leave when the last that came has its first token."""
    sampling = Endless(max_tokens=1000)
    wait_until_idle(engine)
    before = engine.metric("vllm:generation_tokens_total")

    async def body(client: EngineClient) -> None:
        async def read() -> None:
            if streamed:
                await collect(client, engine, "one", PROMPT, sampling)
            else:
                await client.complete(engine.url, "one", PROMPT, sampling)

        readers = [asyncio.create_task(read()) for _ in range(MAX_NUM_SEQS - 1)]
        last = client.stream(engine.url, "one", PROMPT, sampling)
        await anext(last)
        assert not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        await last.aclose()

    with_client(body)
    wait_until_idle(engine)
    assert engine.metric("vllm:generation_tokens_total") - before < MAX_NUM_SEQS * sampling.max_tokens / 2


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
