"""An engine of which a test decides every token and every failure. It speaks the protocol and holds no model."""

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Piece:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[float | None] | None = None
    """None: -0.5 each."""
    has_logprobs: bool = True
    """Whether the chunk has log-probs at all; if not, they are null."""


@dataclass
class Script:
    """How one request goes."""

    pieces: list[Piece] = field(default_factory=list)
    status: int = 200
    message: str = ""
    gates: dict[int, Future[None]] = field(default_factory=dict)
    """The piece with this index waits for its future's result."""
    breaks_off: bool = False
    """Close the connection after the last piece without an end."""
    before: Callable[[], None] = lambda: None
    """Called when the request has arrived."""
    arrived: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the stream is over, or the gateway has closed it."""


def answer(*texts: str, finish: str = "stop", first_id: int = 10) -> Script:
    """One token per text."""
    last = len(texts) - 1
    pieces = [Piece(text, [first_id + i], finish if i == last else None) for i, text in enumerate(texts)]
    return Script(pieces)


def held(script: Script, before: int) -> Future[None]:
    """Let the script wait before the piece with this index; set the result to let it go on."""
    gate: Future[None] = Future()
    script.gates[before] = gate
    return gate


def refusal(status: int, message: str) -> Script:
    return Script(status=status, message=message)


class FakeEngine:
    """`scripts` are used up first to last; without one every request is answered "a" "b" "c"."""

    def __init__(self) -> None:
        self.scripts: deque[Script] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.label = "default-v0"
        """What it says of the weights that sample, if it is asked."""
        self.app = Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])

    @property
    def last(self) -> dict[str, Any]:
        return self.bodies[-1]

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        script = self.scripts.popleft() if self.scripts else answer("a", "b", "c")
        script.arrived.set()
        script.before()
        if script.status != 200:
            error = {"message": script.message, "type": "Error", "param": None, "code": script.status}
            return JSONResponse({"error": error}, script.status)
        return StreamingResponse(_stream(script, body, self.label), media_type="text/event-stream")


async def _stream(script: Script, body: dict[str, Any], label: str) -> AsyncIterator[bytes]:
    tokens = 0
    try:
        for index, piece in enumerate(script.pieces):
            gate = script.gates.get(index)
            if gate is not None:
                await asyncio.shield(asyncio.wrap_future(gate))
            chunk = _chunk(body, piece)
            tokens += len(piece.token_ids)
            if body.get("return_weight_versions") and piece.finish_reason is not None:
                chunk["choices"][0]["weight_versions"] = [{"version": label, "start": 0, "end": tokens}]
            yield _event(chunk)
        if script.breaks_off:
            raise ConnectionResetError
        yield b"data: [DONE]\n\n"
    finally:
        script.left.set()


def _chunk(body: dict[str, Any], piece: Piece) -> dict[str, Any]:
    logprobs = [-0.5] * len(piece.token_ids) if piece.logprobs is None else piece.logprobs
    shown = {
        "tokens": [str(token) for token in piece.token_ids],
        "token_logprobs": logprobs,
        "top_logprobs": [],
        "text_offset": [0] * len(piece.token_ids),
    }
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": body.get("model", "base"),
        "choices": [
            {
                "index": 0,
                "text": piece.text,
                "token_ids": piece.token_ids,
                "logprobs": shown if piece.has_logprobs else None,
                "finish_reason": piece.finish_reason,
                "stop_reason": None,
            }
        ],
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
