"""Work stops when its caller goes away, and its clean-up is waited for."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from app.disconnect import DISCONNECTED, STOPPED, until_disconnect


async def never() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def held_work(messages: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as cancelled:
        await asyncio.sleep(0)
        messages.append(str(cancelled.args[0]))
        raise


def test_the_result_comes_through():
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(until_disconnect(never, work())) == 7


def test_an_error_comes_through():
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(until_disconnect(never, work()))


def test_a_disconnect_cancels_and_waits():
    messages: list[str] = []
    with pytest.raises(ClientDisconnect):
        asyncio.run(until_disconnect(gone, held_work(messages)))
    assert messages == [DISCONNECTED]


def test_a_stop_cancels_and_waits():
    messages: list[str] = []

    async def main() -> None:
        task = asyncio.ensure_future(until_disconnect(never, held_work(messages)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()

    asyncio.run(main())
    assert messages == [STOPPED]
