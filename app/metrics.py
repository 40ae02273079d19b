"""/metrics in Prometheus' text format: counters of the app's processes, and figures from the database.

With several app processes set PROMETHEUS_MULTIPROC_DIR to an empty directory that they share: prometheus_client then
adds their counters up. The database's figures are read at the scrape and are the same from every process.
"""

import os
import time
from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.db.repositories.counts import PolicyFigures, policy_figures
from app.service import ServiceDep

router = APIRouter(tags=["health"])

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


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Counters and figures for Prometheus."""
    figures = await service.read(_figures)
    return Response(generate_latest(_counters()) + generate_latest(_gauges(figures)), media_type=CONTENT_TYPE_LATEST)


def _counters() -> CollectorRegistry:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return _OWN
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry


def _figures(session: Session) -> list[PolicyFigures]:
    return policy_figures(session)


class _Figures(Collector):
    def __init__(self, figures: list[PolicyFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        rollouts = GaugeMetricFamily(
            "evergreen_rollouts", "Rollouts by state and, if skipped, reason", labels=["policy", "state", "reason"]
        )
        live = GaugeMetricFamily("evergreen_live_version", "Version that is served", labels=["policy"])
        head = GaugeMetricFamily("evergreen_head_version", "Newest committed version", labels=["policy"])
        learning = GaugeMetricFamily("evergreen_learning", "1 if learning is on", labels=["policy"])
        updates = GaugeMetricFamily("evergreen_updates_done", "Updates done", labels=["policy"])
        for policy in self._figures:
            for (state, reason), count in policy.rollouts.items():
                rollouts.add_metric([policy.name, state, reason or ""], count)
            learning.add_metric([policy.name], float(policy.learning))
            updates.add_metric([policy.name], policy.updates_done)
            for family, number in ((live, policy.live), (head, policy.head)):
                if number is not None:
                    family.add_metric([policy.name], number)
        return iter((rollouts, live, head, learning, updates))


def _gauges(figures: list[PolicyFigures]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Figures(figures))
    return registry
