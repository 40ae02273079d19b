"""One interaction as it runs: logged before the engine sees it, ended before the caller sees the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import numpy as np
import structlog
from uuid_utils.compat import uuid7

from app.db.models import ApiKey
from app.disconnect import STOPPED
from app.engine.client import (
    AdapterNotLoaded,
    Delta,
    EngineBroke,
    EngineError,
    EngineOverloaded,
    EngineUnreachable,
    Sampling,
)
from app.engine.replicas import Route
from app.errors import ApiError
from app.inference.engine_errors import RequestTimedOut, gateway_error
from app.inference.labels import Labels
from app.inference.routing import Target
from app.inference.trainability import Untrainable
from app.metrics import COMPLETION_TOKENS, PROMPT_TOKENS
from app.rollouts.lifecycle import (
    Begun,
    Completed,
    NewInteraction,
    abort_interaction,
    begin_interaction,
    complete_interaction,
)
from app.rollouts.provenance import Labelled
from app.service import Service

STREAM_END_S = 1.0
WHOLE = ("stop", "length")
"""Finish reasons of a whole answer. With any other (abort, error) the engine gave up in the middle."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Call:
    """A request that has been understood."""

    key: ApiKey
    target: Target
    prompt_ids: list[int]
    sampling: Sampling
    labels: Labels
    untrainable: Untrainable | None
    body: bytes
    """The request as it came."""


class RunningInteraction:
    """Use as `async with await RunningInteraction.begin(...)`. Left before `complete` has committed, the interaction is
    logged as aborted with what was sampled, and the engine's slot is freed.
    """

    def __init__(self, service: Service, call: Call, route: Route) -> None:
        self.call = call
        self.id = uuid7()
        self.created = int(datetime.now(UTC).timestamp())
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.labelled: Labelled | None = None
        self.finish_reason: str | None = None
        self._service = service
        self._route = route
        self._begun: Begun | None = None
        self._deadline = asyncio.get_running_loop().time() + service.settings.request_timeout_s
        self._stream: AsyncGenerator[Delta, None] | None = None
        self._first: Delta | None = None
        self._first_token_at: datetime | None = None
        self._completed = False

    @classmethod
    async def begin(cls, service: Service, call: Call) -> Self:
        """Choose a replica and commit the row as running. Raises what the writer raises."""
        route = service.router.choose(call.target.routes)
        running = cls(service, call, route)
        service.began()
        row = asyncio.ensure_future(running._log_begin())
        try:
            running._begun = await asyncio.shield(row)
        except asyncio.CancelledError as cancelled:
            # the commit may be under way: end whatever it leaves behind
            detail = _why(cancelled)
            row.add_done_callback(lambda done: running._abort_begun(done, detail))
            raise
        finally:
            if running._begun is None:
                route.release()
                service.ended()
        return running

    @property
    def version(self) -> int:
        """Number of the version that serves it; settled once `start` has returned."""
        return self._route.version

    @property
    def headers(self) -> dict[str, str]:
        assert self._begun is not None
        reason = self._begun.untrainable
        return {
            "X-Interaction-Id": str(self.id),
            "X-Rollout-Id": str(self._begun.rollout_id),
            "X-Policy-Version": str(self.version),
            **({"X-Untrained-Reason": str(reason)} if reason else {}),
        }

    async def start(self) -> None:
        """Wait for the first token. Until it comes, an adapter that was just unloaded and engines that cannot be
        reached, have a full queue or break off are got around, as long as there are others.

        Raises:
            ApiError: for the caller.
        """
        avoid: set[str] = set()
        reloaded = False
        while self._first is None:
            try:
                self._first = await self._next()
            except (EngineUnreachable, EngineOverloaded, EngineBroke) as error:
                if not (isinstance(error, EngineOverloaded) and await self._was_paused()):
                    avoid.add(self._route.url)
                await self._reroute(error, avoid)
            except AdapterNotLoaded as error:
                if reloaded:
                    raise gateway_error(error, pinned=self._pinned) from error
                reloaded = True
                try:
                    # an engine that was restarted has lost it, whatever the database still says
                    await self._reroute(error, avoid | {self._route.url})
                except ApiError:
                    if self._pinned:
                        raise
                    await self._reroute(error, avoid)  # the only engine may have the next version by now
            except EngineError as error:
                raise gateway_error(error, pinned=self._pinned) from error
        self._first_token_at = datetime.now(UTC)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the engine streams, to the finish reason. Call `start` first. Raises ApiError."""
        delta = self._first
        assert delta is not None
        while True:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
            self.text += delta.text
            if delta.finish_reason not in (None, *WHOLE):
                gave_up = EngineError(f"it ended the completion with the reason {delta.finish_reason!r}")
                raise gateway_error(gave_up, pinned=self._pinned)
            self.finish_reason = delta.finish_reason
            if delta.finish_reason is not None and self._route.own_weights:
                self.labelled = tuple((span.label, span.count) for span in delta.weight_spans or ())
            yield delta
            if delta.finish_reason is not None:
                return
            try:
                delta = await self._next()
            except EngineError as error:
                raise gateway_error(error, pinned=self._pinned) from error

    async def complete(self, response: bytes) -> None:
        """Commit what was sampled. After this, and not before, the caller may see the end.

        Raises:
            Conflict: a sweep has aborted it meanwhile; the reply must not be delivered.
        """
        assert self._begun is not None
        assert self.finish_reason is not None
        done = self._outcome(self.finish_reason, response)
        await self._service.write(
            lambda session: complete_interaction(session, self.id, done), order=self._begun.rollout_id
        )
        self._completed = True
        policy = self.call.target.policy.name
        PROMPT_TOKENS.labels(policy).inc(len(self.call.prompt_ids))
        COMPLETION_TOKENS.labels(policy).inc(len(self.token_ids))

    async def leave(self, error: BaseException | None) -> None:
        """Free the engine's slot; if nothing was completed, log the interaction as aborted because of `error`."""
        self._route.release()
        try:
            if self._stream is not None:
                await self._end_stream(self._stream)
        finally:
            if not self._completed:
                assert self._begun is not None
                self._abort(self._begun, _why(error))
            self._service.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.leave(error)

    @property
    def _pinned(self) -> bool:
        return self.call.target.number is not None

    async def _log_begin(self) -> Begun:
        call = self.call
        new = NewInteraction(
            id=self.id,
            policy_id=call.target.policy.id,
            key_id=call.key.id,
            client_rollout_id=call.labels.rollout,
            version=self._route.version,
            prompt_ids=np.asarray(call.prompt_ids, dtype=np.int32),
            temperature=call.sampling.temperature,
            sampling=asdict(call.sampling),
            untrainable=call.untrainable.reason if call.untrainable else None,
            detail=call.untrainable.detail if call.untrainable else None,
            request=call.body,
            replica=self._route.url,
            tags=dict(call.labels.tags),
        )
        return await self._service.write(lambda session: begin_interaction(session, new), order=self.id)

    async def _next(self) -> Delta:
        """The engine's next delta. Raises EngineError, or RequestTimedOut at the deadline."""
        if self._stream is None:
            self._stream = self._service.engine.stream(
                self._route.url, self._route.model, self.call.prompt_ids, self.call.sampling
            )
        limit = self._service.settings.request_timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._stream)
        except TimeoutError:
            raise RequestTimedOut(
                f"The completion took longer than {limit:g} s and was stopped: ask for fewer tokens.",
                code="request_timeout",
            ) from None

    async def _was_paused(self) -> bool:
        return await self._service.router.refused_for_swap(self.call.target.policy.id, self._route)

    async def _reroute(self, error: EngineError, avoid: set[str]) -> None:
        self._route.release()
        self._stream = None
        target = self.call.target
        try:
            self._route = await self._service.router.pick(target.policy.id, target.number, avoid=avoid)
        except ApiError:
            raise gateway_error(error, pinned=self._pinned) from error

    async def _end_stream(self, stream: AsyncGenerator[Delta, None]) -> None:
        if self._completed:
            # read to its end, not closed: the connection can then be used again
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STREAM_END_S):
                    async for _ in stream:
                        pass
        await stream.aclose()

    def _outcome(self, finish_reason: str, response: bytes | None) -> Completed:
        return Completed(
            completion_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            finish_reason=finish_reason,
            response=response,
            version=self._route.version,
            replica=self._route.url,
            first_token_at=self._first_token_at,
            labelled=self.labelled,
        )

    def _abort_begun(self, row: asyncio.Future[Begun], detail: str) -> None:
        if not row.cancelled() and row.exception() is None:
            self._abort(row.result(), detail)

    def _abort(self, begun: Begun, detail: str) -> None:
        """Queue the abort; nobody waits for it, since whoever asked is gone or gets an error."""
        partial = self._outcome("abort", None)
        try:
            queued = self._service.writer.submit(
                lambda session: abort_interaction(session, self.id, detail, partial), order=begun.rollout_id
            )
        except ApiError as error:  # the sweep of orphans will end it
            log.warning("abort_not_logged", interaction=str(self.id), error=error.message)
        else:
            queued.add_done_callback(_log_failed_abort)


def _why(error: BaseException | None) -> str:
    if isinstance(error, ApiError):
        return error.message
    if isinstance(error, asyncio.CancelledError):
        return str(error.args[0]) if error.args else STOPPED
    return f"the gateway failed: {error!r}"


def _log_failed_abort(done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.warning("abort_not_logged", error=repr(done.exception()))
