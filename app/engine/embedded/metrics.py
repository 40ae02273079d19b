"""Figures in Prometheus' format; those that vLLM has carry vLLM's names."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.engine.embedded.engine import Engine
from app.engine.embedded.runner import EngineThread


def engine_registry(engine: Engine, thread: EngineThread) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine, thread))
    return registry


class _EngineCollector(Collector):
    """Reads plain integers that the engine's thread writes."""

    def __init__(self, engine: Engine, thread: EngineThread):
        self._engine = engine
        self._thread = thread

    def collect(self) -> Iterator[Metric]:
        counts, scheduler = self._engine.counts, self._engine.scheduler
        gauges = {
            "vllm:num_requests_running": ("Requests that take part in forward passes.", len(scheduler.running)),
            "vllm:num_requests_waiting": ("Requests that wait for a place.", self._thread.waiting),
            "evergreen_engine_free_blocks": ("KV blocks that no running request holds.", scheduler.blocks.free),
        }
        counters = {
            "evergreen_engine_steps": ("Forward passes.", counts.steps),
            "evergreen_engine_mixed_adapter_steps": ("Passes under several adapters.", counts.mixed_adapter_steps),
            "evergreen_engine_computed_tokens": ("Rows of all passes.", counts.computed_tokens),
            "vllm:generation_tokens": ("Sampled tokens.", counts.completion_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens whose KV was shared.", scheduler.prefix_hit_tokens),
            "vllm:num_preemptions": ("Requests that had to give up their KV.", scheduler.preemptions),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
