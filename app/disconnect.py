"""Stop working for a caller who has gone away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")

DISCONNECTED = "the client disconnected"
STOPPED = "the server stopped before the end"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client disconnects first, cancel it (with the message DISCONNECTED), let it clean up, and
    raise ClientDisconnect. The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        await _cancel(task, DISCONNECTED)
        raise ClientDisconnect
    finally:
        watch.cancel()
        if not task.done():
            await _cancel(task, STOPPED)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any], message: str) -> None:
    task.cancel(message)
    await asyncio.wait((task,))
