"""From a call to its HTTP response: whole, or as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from fastapi import Request
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.disconnect import until_disconnect
from app.errors import ApiError
from app.inference.interaction import Call, RunningInteraction
from app.inference.replies import ReplyFormat
from app.service import Service


async def respond(
    request: Request, service: Service, call: Call, shape: ReplyFormat, *, stream: bool, include_usage: bool
) -> Response:
    """Run the call. Errors before the first token raise ApiError; a stream's later ones are its last event."""
    if stream:
        run = await until_disconnect(request.receive, _first_token(service, call))
        return _EventStream(run, shape, include_usage)
    return await until_disconnect(request.receive, _whole(service, call, shape))


async def _whole(service: Service, call: Call, shape: ReplyFormat) -> Response:
    async with await RunningInteraction.begin(service, call) as run:
        await run.start()
        async for _ in run.deltas():
            pass
        body = to_json(shape.whole(run))
        await run.complete(body)
    return Response(body, media_type="application/json", headers=run.headers)


async def _first_token(service: Service, call: Call) -> RunningInteraction:
    """An interaction whose stream has begun; whoever takes it must leave it."""
    run = await RunningInteraction.begin(service, call)
    try:
        await run.start()
    except BaseException as error:
        await run.leave(error)
        raise
    return run


class _EventStream(Response):
    """The reply as server-sent events. The interaction is committed before its last chunk is sent."""

    media_type = "text/event-stream"

    def __init__(self, run: RunningInteraction, shape: ReplyFormat, include_usage: bool) -> None:
        super().__init__(headers={**run.headers, "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._run = run
        self._shape = shape
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async with self._run, aclosing(self._events()) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in events:
                    await send_body(event, more=True)
        except ApiError as error:  # too late for a status; OpenAI's clients raise on such an event
            await send_body(_event(error.body()), more=True)
        await send_body(b"", more=False)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        run, shape = self._run, self._shape
        for chunk in shape.opening(run):
            yield _event(chunk)
        async for delta in run.deltas():
            if delta.finish_reason is not None:
                await run.complete(to_json(shape.whole(run)))
            yield _event(shape.chunk(run, delta))
        if self._include_usage:
            yield _event(shape.usage_chunk(run))
        yield b"data: [DONE]\n\n"


def _event(body: object) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
