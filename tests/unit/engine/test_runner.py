"""The engine's thread: what its clients see when it stops or fails."""

import asyncio
from collections.abc import Callable

import pytest

from app.engine.embedded.detokenizer import Detokenizer
from app.engine.embedded.runner import EngineThread, QueueFull
from app.engine.embedded.sequence import Output, SamplingParams, Sequence
from tests.unit.engine.conftest import Driver


def sequence(driver: Driver, name: str) -> Sequence:
    return Sequence(
        name, None, [5, 6], SamplingParams(4, ignore_eos=True), Detokenizer(driver.engine.tokenizer, [5, 6])
    )


def test_outputs_come_on_the_event_loop_and_an_abort_is_one(drive: Callable[..., Driver]) -> None:
    driver = drive(max_num_seqs=1, max_num_queued_reqs=2)

    async def body() -> tuple[list[Output], Output]:
        thread = EngineThread(driver.engine, on_failure=lambda: None)
        first, second, third = (thread.submit(sequence(driver, name)) for name in "abc")
        with pytest.raises(QueueFull):
            thread.submit(sequence(driver, "d"))
        thread.abort("b")
        thread.start(asyncio.get_running_loop())
        outputs = [await first.get() for _ in range(4)]
        aborted = await second.get()
        while (await third.get()).finish_reason is None:
            pass
        thread.submit(sequence(driver, "e"))
        await asyncio.to_thread(thread.stop)
        assert not thread.alive
        return outputs, aborted

    outputs, aborted = asyncio.run(body())
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert aborted.finish_reason == "abort"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_ends_every_request_and_says_so(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive()

    def fail() -> list[Output]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(driver.engine, "step", fail)

    async def body() -> list[str | None]:
        failed = asyncio.Event()
        thread = EngineThread(driver.engine, on_failure=failed.set)
        outputs = [thread.submit(sequence(driver, name)) for name in "ab"]
        thread.start(asyncio.get_running_loop())
        await failed.wait()
        await asyncio.to_thread(thread.stop)
        return [(await output.get()).finish_reason for output in outputs]

    assert asyncio.run(body()) == ["error", "error"]
