"""A small server with the endpoints that a player uses, and a learner whose progress a test scripts."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

KEY = "eg-test"
Answer = Callable[[int, str], str]
"""(policy version, the last message's text) -> the completion."""


@dataclass
class FakeRollout:
    name: str | None
    """What the player calls it; None: it has one turn."""
    train: bool
    interactions: list[str] = field(default_factory=list)
    state: str = "open"
    reward: float | None = None


@dataclass
class FakeServer:
    """Learns `per_update` rollouts at once: the newest, as soon as so many are ready, while `learning` is set.

    An update lasts for `looks_per_update` looks at rollouts (0: it ends at once) and makes a version.
    """

    answer: Answer
    answer_turn: Callable[[list[dict[str, str]]], str] | None = None
    """All messages -> the completion, instead of `answer`."""
    per_update: int = 16
    looks_per_update: int = 0
    loaded_versions: int = 8
    learning: threading.Event = field(default_factory=threading.Event)
    version: int = 0
    rollouts: dict[str, FakeRollout] = field(default_factory=dict)
    in_flight: int = 0
    most_unfinished: int = 0
    looks: int = 0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Every chat completion's, feedback's and close's path and body, also of those that were made to fail."""
    faults: dict[str, list[Response]] = field(default_factory=dict)
    """Path -> replies that are given instead of the real ones, each once."""
    full: threading.Event = field(default_factory=threading.Event)
    """Set when 64 rollouts are unfinished."""

    look_made: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once per look at a rollout."""

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/feedback", self.feedback, methods=["POST"]),
                Route("/v1/rollouts/{id}", self.rollout),
                Route("/v1/rollouts/{id}/close", self.close, methods=["POST"]),
            ]
        )

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for one, body in self.requests if one == path]

    def unfinished(self) -> int:
        return self.in_flight + sum(r.train and r.state not in ("trained", "skipped") for r in self.rollouts.values())

    async def models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": [{"id": "default"}]})

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(("/chat/completions", body))
        if refusal := self._refusal(request):
            return refusal
        metadata = body.get("metadata", {})
        train = metadata.get("train") != "false"
        self.in_flight += train
        self.most_unfinished = max(self.most_unfinished, self.unfinished())
        if self.unfinished() >= 64:
            self.full.set()
        await asyncio.sleep(0)  # let others in, as a real engine does
        self.in_flight -= train
        name, _, pin = body["model"].partition("@")
        version = int(pin) if pin else self.version
        if name != "default":
            return error(404, "model_not_found", f"there is no {name}")
        if not self.version - self.loaded_versions < version <= self.version:
            return error(404, "version_not_loaded", f"{version} is not loaded")
        rollout = self._rollout_of(metadata.get("rollout_id"), train)
        interaction = f"interaction-{sum(len(r.interactions) for r in self.rollouts.values())}"
        self.rollouts[rollout].interactions.append(interaction)
        if self.answer_turn is None:
            answer = self.answer(version, body["messages"][-1]["content"])
        else:
            answer = self.answer_turn(body["messages"])
        return JSONResponse(
            {
                "id": interaction,
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": answer},
                    }
                ],
            },
            headers={
                "X-Interaction-Id": interaction,
                "X-Rollout-Id": rollout,
                "X-Policy-Version": str(version),
            },
        )

    def _rollout_of(self, name: str | None, train: bool) -> str:
        for identifier, rollout in self.rollouts.items():
            if name is not None and rollout.name == name:
                assert rollout.state == "open", "a turn after the rollout's end"
                return identifier
        identifier = f"00000000-0000-7000-8000-{len(self.rollouts):012d}"
        self.rollouts[identifier] = FakeRollout(name, train)
        return identifier

    async def close(self, request: Request) -> Response:
        self.requests.append(("/close", {"id": request.path_params["id"]}))
        if refusal := self._refusal(request):
            return refusal
        rollout = self.rollouts[request.path_params["id"]]
        rollout.state = "skipped"
        return JSONResponse({"state": rollout.state, "reason": "no_reward"})

    async def feedback(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(("/feedback", body))
        if refusal := self._refusal(request):
            return refusal
        rollout = next(r for r in self.rollouts.values() if body["interaction_id"] in r.interactions)
        rollout.reward = body["reward"]
        if rollout.name is None or body.get("final"):
            rollout.state = "ready"
        self._learn()
        return JSONResponse({"status": "applied", "rollout": {"state": rollout.state, "reason": None}})

    async def rollout(self, request: Request) -> Response:
        self.looks += 1
        self.look_made.release()
        if refusal := self._refusal(request):
            return refusal
        rollout = self.rollouts.get(request.path_params["id"])
        if rollout is None:
            return error(404, "rollout_not_found", "no such rollout")
        self._learn()
        return JSONResponse({"state": rollout.state, "reason": None})

    def _learn(self) -> None:
        training = [r for r in self.rollouts.values() if r.state == "training"]
        if training and self.looks >= self._update_ends:
            for rollout in training:
                rollout.state = "trained"
            self.version += 1
            training = []
        ready = [r for r in self.rollouts.values() if r.state == "ready"]
        if not training and len(ready) >= self.per_update and self.learning.is_set():
            for rollout in ready[-self.per_update :]:
                rollout.state = "training"
            self._update_ends = self.looks + self.looks_per_update
            if not self.looks_per_update:
                self._learn()

    _update_ends: int = 0

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return error(401, "invalid_api_key", "the key is not known")
        faults = self.faults.get(request.url.path.removeprefix("/v1"))
        return faults.pop(0) if faults else None


def error(status: int, code: str, message: str, **headers: str) -> Response:
    body = {"error": {"message": message, "type": "test", "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


@contextmanager
def serving(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve an ASGI app over real HTTP from a thread; yields its root URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    listener.listen()  # from here on a client's connection waits in the queue, it is not refused
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
