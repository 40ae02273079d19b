"""What the canary has read on one engine, by version: kept between passes over it."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from app.engine.control_client import ControlClient
from app.policies.canary import Reading
from app.policies.plan import Step

WHOLE_MODELS_KEPT = 16
"""Of versions whose weights an engine no longer has."""


class Readings:
    def __init__(self, url: str):
        self._url = url
        self._known: dict[str, list[Reading]] = {}

    def known(self, adapter_name: str) -> list[Reading] | None:
        return self._known.get(adapter_name)

    def take(self, engine: ControlClient, adapter_name: str, step: Step) -> list[Reading]:
        """The engine's at the step's probes, under a version that it has loaded; read once per load.

        The first alone, so that the others find their shared prefix computed, in one batch. Raises EngineError.
        """
        if adapter_name not in self._known:
            model = None if step.own_weights else adapter_name
            first, *others = ((self._url, model, prompt) for prompt in step.probes)
            reading: list[Reading] = [engine.top_logprobs(*first)]
            with ThreadPoolExecutor(len(step.probes)) as pool:
                reading += pool.map(lambda asked: engine.top_logprobs(*asked), others)
            self._known[adapter_name] = reading
        return self._known[adapter_name]

    def drop(self, adapter_name: str) -> None:
        self._known.pop(adapter_name, None)

    def keep(self, adapters: Collection[str], *, whole_models: bool) -> None:
        """Adapters' go with them. Those of whole models stay: the canary compares with what is no longer there."""
        gone: Sequence[str] = [name for name in self._known if name not in adapters]
        for name in gone[:-WHOLE_MODELS_KEPT] if whole_models else gone:
            del self._known[name]
