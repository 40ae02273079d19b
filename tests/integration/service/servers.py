"""ASGI applications on real ports, each in a thread of this process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


class Server:
    def __init__(self, app: ASGIApp, drain_s: int) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=drain_s))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def start(self) -> None:
        listening = threading.Event()
        startup = self._uvicorn.startup

        async def announced(sockets: list[socket.socket] | None = None) -> None:
            try:
                await startup(sockets)
            finally:
                listening.set()

        self._uvicorn.startup = announced  # type: ignore[method-assign]
        self._thread.start()
        assert listening.wait(60)
        assert self._uvicorn.started, "the application did not start; see its log"

    def ask_to_stop(self) -> None:
        self._uvicorn.should_exit = True

    def stop(self) -> None:
        self.ask_to_stop()
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()


@contextmanager
def serving(app: ASGIApp, drain_s: int = 10) -> Iterator[Server]:
    """`drain_s`: how long a stop waits for running requests."""
    server = Server(app, drain_s)
    server.start()
    try:
        yield server
    finally:
        server.stop()
