"""A tiny engine over real HTTP for deployment tests: adapters are files that shift the log-probs of a fixed model.

An adapter directory holds shift.json, {token: nats}; so does a directory of whole weights. What the engine can do wrong
is switched on per adapter name, or per directory.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS = 20


def logprobs(adapter: str | Path, prompt: list[int]) -> dict[int, float]:
    """What this model's top list says after `prompt` under the adapter in that directory (not normalised)."""
    shifts = json.loads((Path(adapter) / "shift.json").read_text())
    return {token: -1.0 - 0.1 * ((token + sum(prompt)) % TOKENS) + shifts.get(str(token), 0.0)
            for token in range(TOKENS)}  # fmt: skip


class FakeEngine:
    def __init__(self) -> None:
        self.base = "/base"
        """What it was started on."""
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []
        self.rejects: set[str] = set()
        self.serves_instead: dict[str, str] = {}
        """Adapter name -> directory that is really served under it: a swap that silently did not happen."""
        self.loads_first: set[str] = set()
        """Adapter names that somebody else loads just before the load that is asked for."""
        self.load_s = 0.0
        self.weights: str | None = None
        """Directory of its own weights; None: those that it was started with, which nothing shifts."""
        self.label = "default"
        self.paused = False
        self.calls: list[str] = []
        """What was asked of its own weights, in order; a reload with its directory's name."""
        self.at_reload: Callable[[], None] = lambda: None
        """Called while it is paused, before it answers. What else it is asked to do waits for that, as on an engine."""
        self.lacks: set[str] = set()
        """Paths that it answers with 404, as vLLM does without VLLM_SERVER_DEV_MODE."""
        self.fails: set[str] = set()
        """Paths that it answers with 500."""
        self.tells_versions = True
        self.busy = threading.Event()
        """Set: whatever asks for tokens waits in the queue until it is cleared."""
        self.silent = threading.Event()
        """Set: accept connections and answer nothing until it is cleared."""
        self._orders = ThreadPoolExecutor(1)
        """Carries out what is asked of its own weights: one after the other, even if nobody waits for it any more."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self) -> None:
        """As a process that came back: nothing is loaded."""
        self.adapters.clear()
        self.loads.clear()
        self.weights, self.label, self.paused = None, "default", False

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._orders.shutdown(wait=False)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        path = path.split("?")[0]
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        if path in self.fails:
            return 500, {"error": {"message": f"{path} is broken", "code": 500}}
        if path == "/health":
            return 200, {}
        own = self._own_weights(path, body)
        if own is not None:
            return own
        if path == "/v1/models":
            base = {"id": "base", "root": self.base, "parent": None, "max_model_len": 64}
            return 200, {"data": [base, *({"id": name, "root": root, "parent": "base"}
                                          for name, root in self.adapters.items())]}  # fmt: skip
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/completions" and "model" not in body:
            return self._sample(body)
        name = body["lora_name"] if path == "/v1/unload_lora_adapter" else body["model"]
        if name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist.", "code": 404}}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[name]
            return 200, {}
        while self.busy.is_set():
            time.sleep(0.02)
        top = logprobs(self.serves_instead.get(name, self.adapters[name]), body["prompt"])
        return 200, {"choices": [{"logprobs": {"top_logprobs": [{f"token_id:{k}": v for k, v in top.items()}]}}]}

    def _own_weights(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path in ("/pause", "/resume", "/update_weight_version", "/collective_rpc"):
            return self._orders.submit(self._carry_out, path, body).result()
        return None

    def _carry_out(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            self.calls.append(path[1:])
            return 200, {"status": f"{path[1:]}d"}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            self.calls.append("label")
            return 200, {"success": True, "new_version": self.label}
        directory = Path(body["kwargs"]["weights_path"])
        self.calls.append(f"reload {directory.name}")
        assert self.paused, "reloading under running requests"
        self.at_reload()
        if directory.name in self.rejects:
            return 500, {"error": {"message": "the shapes are those of another model", "code": 500}}
        self.weights = self.serves_instead.get(directory.name, str(directory))
        return 200, {"results": [None]}

    def _sample(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.paused:
            return 503, {"error": {"message": "the engine is paused", "code": 503}}
        while self.busy.is_set():
            time.sleep(0.02)
        choice: dict[str, Any] = {}
        if "logprobs" in body:
            assert self.weights is not None
            top = logprobs(self.weights, body["prompt"])
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{k}": v for k, v in top.items()}]}
        if body.get("return_weight_versions") and self.tells_versions:
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": 1}]
        return 200, {"choices": [choice]}

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        self.loads.append(name)
        if name in self.rejects:
            return 500, {"error": {"message": "rank 64 is above max_lora_rank", "code": 500}}
        time.sleep(self.load_s)
        if name in self.loads_first:
            self.adapters[name] = path
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded.", "code": 400}}
        self.adapters[name] = path
        return 200, {}


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            while engine.silent.is_set():
                threading.Event().wait(0.05)
            status, answer = engine.answer(self.path, body)
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextmanager
def running_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    try:
        yield engine
    finally:
        engine.silent.clear()
        engine.busy.clear()
        engine.stop()
