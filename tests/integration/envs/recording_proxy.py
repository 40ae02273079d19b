"""A reverse proxy that keeps every request it passes on, so that a test can read all that went over the wire."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

_HOP_BY_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "content-encoding"}


@dataclass(frozen=True)
class Recorded:
    method: str
    path: str
    """With the query string, if any."""
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RecordingProxy:
    """Passes everything on to `target` (a root URL) and remembers it in `recorded`."""

    target: str
    recorded: list[Recorded] = field(default_factory=list)

    def app(self) -> ASGIApp:
        self._client = httpx.AsyncClient(base_url=self.target, timeout=120)
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Starlette(routes=[Route("/{path:path}", self._pass_on, methods=methods)])

    async def _pass_on(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        headers = dict(request.headers)
        self.recorded.append(Recorded(request.method, path, headers, body))
        reply = await self._client.request(
            request.method,
            path,
            content=body,
            headers={name: value for name, value in headers.items() if name not in _HOP_BY_HOP},
        )
        kept = {name: value for name, value in reply.headers.items() if name not in _HOP_BY_HOP}
        return Response(reply.content, reply.status_code, kept)
