"""What one app process holds: the database, its writer, the engine's client. Made in app/main.py's lifespan."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from app.db.session import Database
from app.db.writer import StoreUnavailable, Writer
from app.engine.client import EngineClient
from app.engine.replicas import Router
from app.inference.render import Renderers
from app.settings import Settings

T = TypeVar("T")

READ_THREADS = 8
"""Fewer than Database's read connections, so that a read never waits for one."""

CUT_SHORT_S = 5.0
"""uvicorn cancels what outlives its graceful time and shuts down at once; so long may the clean-up take."""


class Service:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
        self.writer = Writer(self.database)
        self.engine = EngineClient(settings.request_timeout_s)
        self.router = Router(self.database)
        self.renderers = Renderers()
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="reader")

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one snapshot of the database, in a thread."""

        def run() -> T:
            with self.database.read() as session:
                return work(session)

        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def write(self, work: Callable[[Session], T], *, order: UUID) -> T:
        """Run `work` in the writer's next group and wait for its commit. `order`: see Writer.

        Raises:
            StoreUnavailable: the database did not take it. Unavailable: see `Writer.submit`. And what `work` raises.
        """
        try:
            return await asyncio.wrap_future(self.writer.submit(work, order=order))
        except (OperationalError, InterfaceError) as error:  # a full disk, say: this item's own, or its group's
            raise StoreUnavailable() from error

    def began(self) -> None:
        """An interaction has begun: `close` waits for its `ended`."""
        self._running += 1
        self._none_runs.clear()

    def ended(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._none_runs.set()

    async def close(self) -> None:
        """Let interactions that were cut short log how they ended, commit what is queued, let go of everything."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none_runs.wait(), CUT_SHORT_S)
        await asyncio.to_thread(self.writer.stop)
        await self.engine.aclose()
        self._readers.shutdown()
        self.database.close()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]
