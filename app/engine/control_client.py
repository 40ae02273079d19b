"""The engine protocol's control side, for deployment: health, models, adapters, a canary's probe. Sync."""

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from app.engine.errors import AdapterNotLoaded, AdapterRejected, EngineError
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


class ControlClient:
    """Raises the errors of app/engine/errors.py."""

    def __init__(self, timeout_s: float = 60.0):
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(keepalive_expiry=REUSE_WITHIN_S),
            trust_env=False,
        )

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

    def top_logprobs(self, url: str, model: str, prompt_ids: Sequence[int], k: int = 20) -> dict[int, float]:
        """The k most likely next tokens after `prompt_ids` with their log-probs at temperature 1; k is at most 20.

        The sampled token is reported too, so there may be k + 1; the caller compares the ids that all lists share.
        """
        with transport_errors(url):
            response = self._http.post(
                f"{url}/v1/completions",
                json={
                    "model": model,
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
