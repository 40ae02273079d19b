"""Pause, reload, label, resume: vLLM's endpoints for new weights under running requests.

Shapes: vLLM 0.33, entrypoints/serve/dev/rlhf and .../rpc, which it has with VLLM_SERVER_DEV_MODE=1 only. Here they are
always on: like the adapters' endpoints they have no key, so the engine listens on the loopback interface.
"""

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.engine.embedded.engine import Engine
from app.engine.embedded.protocol import (
    CollectiveRpcRequest,
    EngineHttpError,
    UpdateWeightVersionRequest,
    bad_request,
)
from app.engine.embedded.runner import EngineThread
from app.engine.embedded.weights import WeightsUnsupported


def weight_swap_router(engine: Engine, thread: EngineThread) -> APIRouter:
    router = APIRouter()

    @router.post("/pause")
    async def pause(mode: Annotated[str, Query()] = "abort", clear_cache: bool = True) -> dict[str, str]:
        """Freeze every request where it is. vLLM's default mode ends them, and is refused."""
        if mode != "keep":
            raise bad_request("The embedded engine pauses with mode=keep only", "mode", mode)
        await thread.call(lambda: engine.pause(clear_cache=clear_cache))
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await thread.call(engine.resume)
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": engine.paused}

    @router.post("/collective_rpc")
    async def collective_rpc(body: CollectiveRpcRequest) -> dict[str, list[Any]]:
        """reload_weights, the only method. Unlike vLLM's it changes all weights or none, and no stale KV is left."""
        directory = Path(body.weights_path())
        try:
            await thread.call(lambda: engine.reload_weights(directory))
        except WeightsUnsupported as error:
            raise EngineHttpError(500, "InternalServerError", f"reload_weights failed: {error}") from error
        return {"results": [None]}

    @router.post("/update_weight_version")
    async def update_weight_version(body: UpdateWeightVersionRequest) -> dict[str, Any]:
        def label() -> None:
            engine.weight_version = body.new_version

        await thread.call(label)
        return {"success": True, "new_version": body.new_version}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": engine.weight_version}

    return router
