"""The engine protocol's control side, for deployment: health, models, adapters, weights, a canary's probe. Sync."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from app.engine.errors import AdapterNotLoaded, AdapterRejected, EngineError, WeightsRejected
from app.engine.wire import CONNECT_TIMEOUT_S, REUSE_WITHIN_S, error_of, raise_for_error, transport_errors


@dataclass(frozen=True)
class ServedModel:
    """One entry of /v1/models: the base model (parent None) or a loaded adapter."""

    id: str
    root: str
    """Directory it was loaded from."""
    parent: str | None
    max_model_len: int | None
    """Context in tokens; the base model's entry alone states it."""


def _noticing_a_vanished_peer() -> list[tuple[int, int, int]]:
    """Socket options: a machine that is gone without a word ends the wait for its answer within a minute, where the
    platform lets it be set, however long the wait may last."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
    return options


class ControlClient:
    """Raises the errors of app/engine/errors.py.

    Args:
        timeout_s: for an answer, a reload's apart.
        reload_timeout_s: for that one.
    """

    def __init__(self, timeout_s: float = 60.0, reload_timeout_s: float = 1800.0):
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=httpx.HTTPTransport(
                limits=httpx.Limits(keepalive_expiry=REUSE_WITHIN_S),
                trust_env=False,
                socket_options=_noticing_a_vanished_peer(),
            ),
            trust_env=False,
        )
        self._reload_timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, read=reload_timeout_s)

    def close(self) -> None:
        self._http.close()

    def health(self, url: str) -> bool:
        """True if the engine serves; False if it does not answer 200 within five seconds."""
        try:
            return self._http.get(f"{url}/health", timeout=CONNECT_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def models(self, url: str) -> list[ServedModel]:
        with transport_errors(url):
            response = self._http.get(f"{url}/v1/models")
        raise_for_error(response)
        try:
            return [
                ServedModel(
                    id=entry["id"],
                    root=entry["root"],
                    parent=entry["parent"],
                    max_model_len=entry.get("max_model_len"),
                )
                for entry in response.json()["data"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{url} sent a list of models that is none: {error!r}") from error

    def load_adapter(self, url: str, name: str, path: str) -> None:
        """Loads the PEFT LoRA directory `path` under `name`; AdapterRejected with the engine's reason."""
        with transport_errors(url):
            response = self._http.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        if response.status_code != httpx.codes.OK:
            raise AdapterRejected(f"{url} did not load {name}: {error_of(response)[0]}")

    def unload_adapter(self, url: str, name: str) -> None:
        """Drops the name; running requests end under it. AdapterNotLoaded if the engine does not know it."""
        with transport_errors(url):
            response = self._http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterNotLoaded(error_of(response)[0])
        raise_for_error(response)

    def is_paused(self, url: str) -> bool:
        return bool(self._swap(url, "GET", "/is_paused")["is_paused"])

    def pause(self, url: str) -> None:
        """Freeze what runs and waits, and forget its KV: it is computed anew, by the weights of the day, on resume."""
        self._swap(url, "POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    def resume(self, url: str) -> None:
        self._swap(url, "POST", "/resume")

    def reload_weights(self, url: str, path: str) -> None:
        """Load the model directory `path` in place of what is served. The engine must be paused.

        Raises:
            WeightsRejected: with the engine's reason. vLLM may have changed some of its weights by then. EngineSlow: it
                may still be at work on it; what is asked of it next is answered afterwards, /is_paused perhaps at once.
        """
        what = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._swap(url, "POST", "/collective_rpc", json=what, timeout=self._reload_timeout)

    def label_weights(self, url: str, label: str) -> None:
        """What completions will say of the weights that sampled them."""
        self._swap(url, "POST", "/update_weight_version", json={"new_version": label})

    def weight_label(self, url: str) -> str:
        """The label that was set last; "default" on an engine that has not been told any since its start."""
        return str(self._swap(url, "GET", "/weight_info")["weight_version"])

    def sampled_by(self, url: str, prompt_ids: Sequence[int]) -> str | None:
        """Sample one token from the engine's own weights: their label, as completions tell it; None if they do not."""
        with transport_errors(url):
            response = self._http.post(
                f"{url}/v1/completions",
                json={"prompt": list(prompt_ids), "max_tokens": 1, "return_weight_versions": True},
            )
        raise_for_error(response)
        try:
            spans = response.json()["choices"][0].get("weight_versions")
            return None if not spans else str(spans[-1]["version"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{url} sent an answer that is no completion: {error!r}") from error

    def _swap(self, url: str, method: str, path: str, **what: Any) -> dict[str, Any]:
        with transport_errors(url):
            response = self._http.request(method, f"{url}{path}", **what)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise WeightsRejected(
                f"{url} has no {path}: a policy that trains all weights needs vLLM 0.33 or newer, started with "
                "VLLM_SERVER_DEV_MODE=1, or the embedded engine"
            )
        if response.status_code != httpx.codes.OK:
            raise WeightsRejected(f"{url}{path} answered {response.status_code}: {error_of(response)[0]}")
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise EngineError(f"{url}{path} sent an answer that is no JSON: {error!r}") from error
        return answer

    def top_logprobs(self, url: str, model: str | None, prompt_ids: Sequence[int], k: int = 20) -> dict[int, float]:
        """The k most likely next tokens after `prompt_ids` with their log-probs at temperature 1; k is at most 20.

        model: an adapter; None: the engine's own weights.

        The sampled token is reported too, so there may be k + 1; the caller compares the ids that all lists share.
        """
        with transport_errors(url):
            response = self._http.post(
                f"{url}/v1/completions",
                json=({} if model is None else {"model": model})
                | {
                    "prompt": list(prompt_ids),
                    "max_tokens": 1,
                    "temperature": 1.0,
                    "logprobs": k,
                    "return_tokens_as_token_ids": True,
                },
            )
        raise_for_error(response)
        try:
            (top,) = response.json()["choices"][0]["logprobs"]["top_logprobs"]
            return {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{url} sent no top log-probs: {error!r}") from error
