"""LoRA adapters: reading PEFT directories, and the registry of those that are served."""

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

logger = logging.getLogger(__name__)

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterMissing(Exception):
    """There is no adapter at the path."""


class AdapterUnsupported(Exception):
    """The adapter cannot be served; the message says why."""


class AdapterExists(Exception):
    """The name is taken."""


@dataclass(frozen=True)
class LowRank:
    """One linear layer's update: y += scaling * (x a^T) b^T."""

    a: Tensor
    """(rank, inputs), in the model's dtype."""
    b: Tensor
    """(outputs, rank), in the model's dtype."""
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """Immutable weights. Whoever runs under it holds a reference, so unloading never pulls it from under a request."""

    id: int
    """Unique per load, also of a reused name or path: KV computed under another load is never shared."""
    name: str
    path: str
    weights: Mapping[str, LowRank]
    """By the linear layer's module name."""


class AdapterStore:
    """Names that are served, and the weights held in memory. Thread-safe: endpoints load while the model runs."""

    def __init__(self, layers: Mapping[str, torch.nn.Linear], *, dtype: torch.dtype, max_rank: int, max_in_memory: int):
        self._layers = layers
        self._dtype = dtype
        self._max_rank = max_rank
        self._max_in_memory = max_in_memory
        self._lock = threading.Lock()
        self._served: dict[str, tuple[int, str]] = {}
        self._memory: OrderedDict[int, Adapter] = OrderedDict()
        self._ids = count(1)

    def served(self) -> dict[str, str]:
        """Adapter name -> path."""
        with self._lock:
            return {name: path for name, (_, path) in self._served.items()}

    def load(self, name: str, path: str) -> None:
        started = time.perf_counter()
        with self._lock:
            if name in self._served:
                raise AdapterExists(name)
            identifier = next(self._ids)
        adapter = self._read(identifier, name, path)
        with self._lock:
            if name in self._served:
                raise AdapterExists(name)
            self._served[name] = (identifier, path)
            self._remember(adapter)
        logger.info("loaded adapter %s from %s in %.0f ms", name, path, 1e3 * (time.perf_counter() - started))

    def unload(self, name: str) -> bool:
        """False if the name is not served. Requests that have started end under it."""
        with self._lock:
            known = self._served.pop(name, None)
            if known is None:
                return False
            self._memory.pop(known[0], None)
        logger.info("unloaded adapter %s", name)
        return True

    def get(self, name: str) -> Adapter | None:
        """The adapter, read again from its path if memory had no room for it; None if the name is not served."""
        with self._lock:
            known = self._served.get(name)
            if known is None:
                return None
            identifier, path = known
            adapter = self._memory.get(identifier)
            if adapter is not None:
                self._memory.move_to_end(identifier)
                return adapter
        adapter = self._read(identifier, name, path)
        with self._lock:
            if self._served.get(name) == known:
                self._remember(adapter)
        return adapter

    def serves(self, adapter: Adapter) -> bool:
        with self._lock:
            return self._served.get(adapter.name) == (adapter.id, adapter.path)

    def _remember(self, adapter: Adapter) -> None:
        self._memory[adapter.id] = adapter
        self._memory.move_to_end(adapter.id)
        while len(self._memory) > self._max_in_memory:
            self._memory.popitem(last=False)

    def _read(self, identifier: int, name: str, path: str) -> Adapter:
        directory = Path(path)
        try:
            config = json.loads((directory / "adapter_config.json").read_text())
            tensors = load_file(directory / "adapter_model.safetensors")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AdapterMissing(f"No adapter found for {path}") from error
        except (ValueError, SafetensorError) as error:
            raise AdapterUnsupported(f"{path} is damaged: {error}") from error
        _check_config(config)
        return Adapter(identifier, name, path, self._weights(config, tensors))

    def _weights(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, LowRank]:
        sides: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is None or match["module"] not in self._layers:
                raise AdapterUnsupported(f"{key} does not belong to a linear layer that takes LoRA")
            sides.setdefault(match["module"], {})[match["side"]] = tensor.to(self._dtype)
        weights = {}
        for module, pair in sides.items():
            layer = self._layers[module]
            if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
                raise AdapterUnsupported(f"{module} lacks one of lora_A and lora_B, or their ranks differ")
            if pair["A"].shape[1] != layer.in_features or pair["B"].shape[0] != layer.out_features:
                raise AdapterUnsupported(f"{module} has the shapes of another model")
            rank = pair["A"].shape[0]
            if rank > self._max_rank:
                raise AdapterUnsupported(f"LoRA rank {rank} is greater than max_lora_rank {self._max_rank}.")
            weights[module] = LowRank(pair["A"], pair["B"], _scaling(config, module, rank))
        if not weights:
            raise AdapterUnsupported("the adapter has no weights")
        return weights


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuses what changes the numbers in a way that factorised LoRA on linear layers does not express."""
    if config.get("peft_type") != "LORA":
        raise AdapterUnsupported(f"peft_type {config.get('peft_type')!r} is not supported, only LORA")
    if config.get("use_dora"):
        raise AdapterUnsupported("DoRA is not supported")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise AdapterUnsupported("Adapter bias is not supported.")
    if config.get("modules_to_save"):
        raise AdapterUnsupported(f"modules_to_save is not supported: {config['modules_to_save']}")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(("pissa", "olora", "corda")):
        raise AdapterUnsupported(f"init_lora_weights {initial!r} changes the base weights and is not supported")
    if config.get("fan_in_fan_out"):
        raise AdapterUnsupported("fan_in_fan_out is not supported")


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732); alpha_pattern as PEFT matches it."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
