"""The engine's thread, and the bridge between it and the event loop that serves HTTP."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from app.engine.embedded.engine import Engine
from app.engine.embedded.sequence import Output, Sequence
from app.engine.embedded.weights import WeightsUnsupported


class QueueFull(Exception):
    """As many requests as may run and wait are there."""


class EngineThread:
    """Runs the engine in a thread of its own; `submit`, `abort` and `call` are called on the event loop.

    If the engine fails, its traceback is printed, every request ends with finish_reason error, and `on_failure` is
    called: the process should end and be started anew, since nobody knows what state the model is in.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[], None]):
        self._engine = engine
        self._on_failure = on_failure
        self._capacity = engine.options.max_num_seqs + engine.options.max_num_queued_reqs
        self._wake = threading.Condition()
        self._added: deque[Sequence] = deque()
        self._aborted: deque[str] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._stopping = False
        self._listeners: dict[str, asyncio.Queue[Output]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests that no pass has taken up yet."""
        return len(self._added) + len(self._engine.scheduler.waiting)

    def submit(self, sequence: Sequence) -> asyncio.Queue[Output]:
        """Queues a request; its outputs, of which the last has a finish reason. Raises QueueFull."""
        if len(self._listeners) >= self._capacity:
            raise QueueFull
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._listeners[sequence.request_id] = outputs
        with self._wake:
            self._added.append(sequence)
            self._wake.notify()
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request before the next pass; nothing happens if it has ended."""
        with self._wake:
            self._aborted.append(request_id)
            self._wake.notify()

    async def call(self, work: Callable[[], None]) -> None:
        """Runs `work` between two passes, after everything that was submitted before. Raises its WeightsUnsupported."""
        done: Future[None] = Future()
        with self._wake:
            self._calls.append((work, done))
            self._wake.notify()
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        torch.set_num_threads(self._engine.options.threads)
        finished = False
        try:
            while self._take_orders():
                outputs = self._engine.step() if self._engine.busy else []
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
            finished = True
        finally:
            if not finished:
                self._loop.call_soon_threadsafe(self._fail)

    def _take_orders(self) -> bool:
        """Waits for something to do and passes on what has arrived; False when the thread should end."""
        with self._wake:
            self._wake.wait_for(self._has_orders)
            added, self._added = self._added, deque()
            aborted, self._aborted = self._aborted, deque()
            calls, self._calls = self._calls, deque()
        for sequence in added:
            self._engine.add(sequence)
        ended = [output for request_id in aborted if (output := self._engine.abort(request_id)) is not None]
        if ended:
            self._loop.call_soon_threadsafe(self._deliver, ended)
        for work, done in calls:
            _settle(work, done)
        return not self._stopping

    def _has_orders(self) -> bool:
        return bool(self._stopping or self._added or self._aborted or self._calls or self._engine.busy)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            listener = self._listeners[output.request_id]
            listener.put_nowait(output)
            if output.finish_reason is not None:
                del self._listeners[output.request_id]

    def _fail(self) -> None:
        self._deliver([Output(request_id, None, "", "error") for request_id in self._listeners])
        self._on_failure()


def _settle(work: Callable[[], None], done: Future[None]) -> None:
    """Whatever else `work` raises fails the engine, as a pass that raises does."""
    if not done.set_running_or_notify_cancel():
        return  # whoever asked is gone
    try:
        work()
    except WeightsUnsupported as error:
        done.set_exception(error)
    else:
        done.set_result(None)
