"""The embedded engine's HTTP side: the part of vLLM's protocol that docs/architecture.md lists."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.engine.embedded.adapters import Adapter, AdapterExists, AdapterMissing, AdapterUnsupported
from app.engine.embedded.answer import AnswerWriter
from app.engine.embedded.detokenizer import Detokenizer
from app.engine.embedded.engine import Engine
from app.engine.embedded.metrics import engine_registry
from app.engine.embedded.protocol import (
    CompletionRequest,
    EngineHttpError,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    bad_request,
    chunk_body,
    completion_body,
    model_body,
    usage_body,
)
from app.engine.embedded.runner import EngineThread, QueueFull
from app.engine.embedded.sequence import Output, SamplingParams, Sequence
from app.engine.embedded.weight_swap import weight_swap_router

logger = logging.getLogger(__name__)


def create_app(engine: Engine, thread: EngineThread) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(thread.stop)

    app = FastAPI(lifespan=lifespan, title="Evergreen embedded engine", docs_url=None, redoc_url=None)
    base = engine.options.served_model_name
    registry = engine_registry(engine, thread)
    app.include_router(weight_swap_router(engine, thread))

    @app.exception_handler(EngineHttpError)
    async def _engine_error(_: Request, error: EngineHttpError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def _validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_validation_body(error), 400)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if thread.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entries = [model_body(base, str(engine.options.model), None, engine.model.max_model_len)]
        entries += [model_body(name, path, base, None) for name, path in engine.adapters.served().items()]
        return {"object": "list", "data": entries}

    @app.post("/v1/load_lora_adapter")
    def load_adapter(body: LoadAdapterRequest) -> PlainTextResponse:
        _load(engine, body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest) -> PlainTextResponse:
        if not engine.adapters.unload(body.lora_name):
            raise EngineHttpError(404, "NotFoundError", f"The lora adapter '{body.lora_name}' cannot be found.")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        body.check(engine.model.vocabulary)
        name = body.model or base
        adapter = None if name == base else await _adapter(engine, name)
        sequence = _sequence(engine, body, adapter)
        try:
            outputs = thread.submit(sequence)
        except QueueFull as error:
            raise EngineHttpError(
                503, "Service Unavailable", "The engine is currently busy and cannot accept new requests."
            ) from error
        gone = asyncio.create_task(_abort_when_gone(thread, sequence.request_id, http))
        answer = _Answer(engine, body, name, sequence, outputs)
        if not body.stream:
            try:
                return JSONResponse(await answer.whole())
            finally:
                gone.cancel()
        try:
            first = await outputs.get()
        except asyncio.CancelledError:
            gone.cancel()
            raise
        if first.finish_reason in ("missing", "error"):
            gone.cancel()
        _raise_if_failed(first, name)
        return StreamingResponse(answer.events(first, gone), media_type="text/event-stream")

    return app


class _Answer:
    """One request's answer, whole or as server-sent events."""

    def __init__(
        self,
        engine: Engine,
        body: CompletionRequest,
        model: str,
        sequence: Sequence,
        outputs: asyncio.Queue[Output],
    ):
        self._body = body
        self._model = model
        self._sequence = sequence
        self._outputs = outputs
        self._writer = AnswerWriter(body, sequence, engine.tokenizer)
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        collected: list[Output] = []
        while not collected or collected[-1].finish_reason is None:
            collected.append(await self._outputs.get())
        _raise_if_failed(collected[-1], self._model)
        choice = self._writer.choice(collected)
        return completion_body(self._sequence.request_id, self._created, self._model, choice, self._usage())

    async def events(self, first: Output, gone: "asyncio.Task[None]") -> AsyncIterator[str]:
        output = first
        identity = (self._sequence.request_id, self._created, self._model)
        try:
            while True:
                if output.finish_reason == "error":
                    yield _event(_internal_error().body)
                    break
                yield _event(chunk_body(*identity, self._writer.choice([output])))
                if output.finish_reason is not None:
                    options = self._body.stream_options
                    if options is not None and options.include_usage:
                        chunk = completion_body(*identity, {}, self._usage())
                        yield _event(chunk | {"choices": []})
                    break
                output = await self._outputs.get()
            yield "data: [DONE]\n\n"
        finally:
            gone.cancel()

    def _usage(self) -> dict[str, int]:
        return usage_body(len(self._sequence.prompt_ids), self._sequence.completion_tokens)


async def _abort_when_gone(thread: EngineThread, request_id: str, http: Request) -> None:
    """Waits for the client's disconnect; cancelled when the answer is complete."""
    try:
        while (await http.receive())["type"] != "http.disconnect":
            pass
    finally:
        # also when the server cancels the answer itself: an ended request is left alone
        thread.abort(request_id)


async def _adapter(engine: Engine, name: str) -> Adapter:
    try:
        adapter = await asyncio.to_thread(engine.adapters.get, name)
    except (AdapterMissing, AdapterUnsupported) as error:
        raise EngineHttpError(500, "InternalServerError", f"Reading adapter {name} again failed: {error}") from error
    if adapter is None:
        raise _unknown_model(name)
    return adapter


def _sequence(engine: Engine, body: CompletionRequest, adapter: Adapter | None) -> Sequence:
    """Checks what depends on the model: token ids and lengths. max_tokens is cut to the context, as vLLM does."""
    prompt_ids = body.prompt or []
    if isinstance(prompt_ids, str):
        prompt_ids = engine.tokenizer.encode(prompt_ids, add_special_tokens=body.add_special_tokens).ids
    if not prompt_ids:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    limit, length = engine.model.max_model_len, len(prompt_ids)
    if length >= limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input "
            "tokens, which leaves no room for an output token. Please reduce the length of the input prompt.",
            "input_tokens",
            length,
        )
    if body.max_tokens is not None and body.max_tokens > limit:
        raise bad_request(
            f"max_tokens={body.max_tokens} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            "max_tokens",
            body.max_tokens,
        )
    unknown = max(prompt_ids)
    if unknown >= engine.model.vocabulary:
        raise bad_request(f"Token id {unknown} is out of vocabulary", "prompt", unknown)
    sampling = SamplingParams(
        max_tokens=min(body.max_tokens or limit, limit - length),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=body.seed,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        top_logprobs=body.logprobs or 0,
    )
    detokenizer = Detokenizer(
        engine.tokenizer, prompt_ids, stop=body.stop_strings, skip_special_tokens=body.skip_special_tokens
    )
    return Sequence(f"cmpl-{uuid.uuid4().hex}", adapter, prompt_ids, sampling, detokenizer)


def _load(engine: Engine, body: LoadAdapterRequest) -> None:
    name = body.lora_name
    if not name or not body.lora_path:
        raise EngineHttpError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
    if name == engine.options.served_model_name:
        raise EngineHttpError(400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model.")
    if body.load_inplace:
        raise EngineHttpError(
            400, "InvalidUserInput", "load_inplace mixes versions within a request: load a new name instead."
        )
    try:
        engine.adapters.load(name, body.lora_path)
    except AdapterExists as error:
        raise EngineHttpError(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.") from error
    except AdapterMissing as error:
        raise EngineHttpError(404, "NotFoundError", f"Loading lora {name} failed: {error}") from error
    except AdapterUnsupported as error:
        raise EngineHttpError(500, "InternalServerError", f"Loading lora {name} failed: {error}") from error


def _unknown_model(name: str) -> EngineHttpError:
    return EngineHttpError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")


def _internal_error() -> EngineHttpError:
    return EngineHttpError(500, "InternalServerError", "The model produced no finite log-probs, or the engine failed.")


def _raise_if_failed(output: Output, name: str) -> None:
    if output.finish_reason == "missing":
        raise _unknown_model(name)
    if output.finish_reason == "error":
        raise _internal_error()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _validation_body(error: RequestValidationError) -> dict[str, Any]:
    details = error.errors()
    lines = [f"  {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
    message = f"{len(details)} validation error{'s' if len(details) > 1 else ''}:\n" + "\n".join(lines)
    parameter = ".".join(map(str, details[0]["loc"])) if details else None
    return {"error": {"message": message, "type": "Bad Request", "param": parameter, "code": 400}}
