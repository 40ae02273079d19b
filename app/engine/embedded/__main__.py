"""`python -m app.engine.embedded --model DIR`: the embedded engine as a process of its own."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
import uvicorn

from app.engine.embedded.engine import Engine
from app.engine.embedded.options import EngineOptions
from app.engine.embedded.runner import EngineThread
from app.engine.embedded.server import create_app
from app.engine.wire import KEEP_ALIVE_S
from app.policies.dtype import resolve_dtype

DEFAULTS = EngineOptions(model=Path(), served_model_name="")


def serve(
    model: Annotated[Path, typer.Option(help="Model directory in Hugging Face layout.", exists=True, file_okay=False)],
    host: str = "127.0.0.1",
    port: int = 8101,
    served_model_name: Annotated[str | None, typer.Option(help="Id of the base model; the path if absent.")] = None,
    dtype: Literal["auto", "bfloat16", "float32"] = DEFAULTS.dtype,
    max_model_len: int | None = None,
    kv_tokens: int = DEFAULTS.kv_tokens,
    max_num_seqs: int = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: int = DEFAULTS.max_num_batched_tokens,
    max_num_queued_reqs: int = DEFAULTS.max_num_queued_reqs,
    max_loras: int = DEFAULTS.max_loras,
    max_cpu_loras: int = DEFAULTS.max_cpu_loras,
    max_lora_rank: int = DEFAULTS.max_lora_rank,
    threads: Annotated[int, typer.Option(help="torch threads; half of the cores by default.")] = DEFAULTS.threads,
) -> None:
    """Serves the part of vLLM's protocol that Evergreen uses; adapters are loaded over HTTP."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(threads)
    engine = Engine(
        EngineOptions(
            model=model.resolve(),
            served_model_name=served_model_name or str(model),
            dtype=resolve_dtype(dtype, model),
            max_model_len=max_model_len,
            kv_tokens=kv_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_queued_reqs=max_num_queued_reqs,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
            threads=threads,
        )
    )
    failed = False

    def fail() -> None:
        nonlocal failed
        failed = True
        server.should_exit = True

    app = create_app(engine, EngineThread(engine, fail))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
    )
    server.run()
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(serve)
