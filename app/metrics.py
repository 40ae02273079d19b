"""/metrics in Prometheus' text format: counters of the app's processes, and figures from the database.

With several app processes set PROMETHEUS_MULTIPROC_DIR to an empty directory that they share: prometheus_client then
adds their counters up. The database's figures are the same from every process, but for their age.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.db.repositories.policies import list_policies
from app.db.repositories.stats import policy_stats
from app.service import Service, ServiceDep

router = APIRouter(tags=["health"])

FIGURES_KEPT_S = 5.0

_OWN = CollectorRegistry()
REQUESTS = Counter("evergreen_requests", "HTTP requests by route and status", ["route", "status"], registry=_OWN)
SECONDS = Histogram(
    "evergreen_request_seconds",
    "Time from a request's arrival to its last byte",
    ["route"],
    registry=_OWN,
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600),
)
PROMPT_TOKENS = Counter("evergreen_prompt_tokens", "Prompt tokens of completed interactions", ["policy"], registry=_OWN)
COMPLETION_TOKENS = Counter(
    "evergreen_completion_tokens", "Sampled tokens of completed interactions", ["policy"], registry=_OWN
)


class CountRequests:
    """ASGI middleware: one count and one duration per request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            REQUESTS.labels(route, str(status)).inc()
            SECONDS.labels(route).observe(time.perf_counter() - began)


class RecentFigures:
    """The database's figures, counted again after FIGURES_KEPT_S: they cost a walk over every policy's rows, on the
    threads that requests read with, and whoever reaches the port may ask for them."""

    def __init__(self) -> None:
        self._counting = asyncio.Lock()
        self._figures: list[dict[str, Any]] = []
        self._kept_until = 0.0

    async def get(self, service: Service) -> list[dict[str, Any]]:
        """What policy_stats says of each policy. Calls that come while it is counted wait for the same answer."""
        async with self._counting:
            if time.monotonic() >= self._kept_until:
                self._figures = await service.read(_count)
                self._kept_until = time.monotonic() + FIGURES_KEPT_S
            return self._figures


def _count(session: Session) -> list[dict[str, Any]]:
    return [policy_stats(session, policy) for policy in list_policies(session)]


@router.get("/metrics")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Counters and figures for Prometheus; figures may be a few seconds old."""
    recent: RecentFigures = request.app.state.figures
    figures = await recent.get(service)
    shown = CollectorRegistry()
    shown.register(_Figures(figures))
    return Response(generate_latest(_counters()) + generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


def _counters() -> CollectorRegistry:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return _OWN
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry


_NUMBERS = (
    ("evergreen_live_version", "Version that is served", "live"),
    ("evergreen_head_version", "Newest committed version", "head"),
    ("evergreen_learning", "1 if learning is on", "learning"),
    ("evergreen_updates_done", "Updates done", "updates_done"),
)
_COUNTS = (
    ("evergreen_rollouts", "Rollouts by state", "rollouts", "state"),
    ("evergreen_rollouts_skipped", "Skipped rollouts by reason", "skipped", "reason"),
    ("evergreen_interactions", "Interactions by state", "interactions", "state"),
    ("evergreen_interactions_untrained", "Interactions that are not trained, by reason", "untrained", "reason"),
    ("evergreen_reward_mean", "Mean return of the newest rollouts that became ready", "reward", "window"),
)
"""(metric, help, key in policy_stats, label)."""
_SECONDS = (
    ("evergreen_swap_seconds", "From a batch's last reward to the first answer it changed", "swap_s"),
    ("evergreen_weights_paused_seconds", "An engine stood still for a swap of whole weights", "paused_s"),
    ("evergreen_weights_closed_seconds", "New requests waited for a swap of whole weights", "closed_s"),
)
"""(metric, help, key in policy_stats): quantiles."""


class _Figures(Collector):
    def __init__(self, figures: list[dict[str, Any]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, text, key in _NUMBERS:
            family = GaugeMetricFamily(name, text, labels=["policy"])
            for policy in self._figures:
                if policy[key] is not None:
                    family.add_metric([policy["policy"]], float(policy[key]))
            yield family
        for name, text, key, label in _COUNTS:
            family = GaugeMetricFamily(name, text, labels=["policy", label])
            for policy in self._figures:
                for value, figure in policy[key].items():
                    if figure is not None:
                        family.add_metric([policy["policy"], str(value)], float(figure))
            yield family
        yield from self._swaps()

    def _swaps(self) -> Iterator[Metric]:
        for name, text, of in _SECONDS:
            seconds = GaugeMetricFamily(name, text, labels=["policy", "quantile"])
            for policy in self._figures:
                for quantile, key in (("0.5", "median"), ("0.99", "p99")):
                    if policy[of][key] is not None:
                        seconds.add_metric([policy["policy"], quantile], policy[of][key])
            yield seconds
        versions = GaugeMetricFamily("evergreen_swaps", "Versions that evergreen_swap_seconds is of", labels=["policy"])
        for policy in self._figures:
            versions.add_metric([policy["policy"]], policy["swap_s"]["versions"])
        yield versions
