"""What monitoring scrapes."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.orm import Session

from app import metrics
from app.db.models import Policy
from tests.integration.service.world import World

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def http(world: World):
    with world.http() as client:
        yield client


def test_metrics(http, world: World):
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    before = sampled_tokens(http)
    http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    assert sampled_tokens(http) - before == 3
    text = http.get("/metrics").text
    assert 'evergreen_live_version{policy="default"} 0.0' in text
    assert 'evergreen_rollouts{policy="default",state="ready"}' in text
    assert 'evergreen_requests_total{route="/v1/chat/completions",status="200"}' in text
    http.get("/admin/policies/default").raise_for_status()
    http.get("/nowhere")
    again = http.get("/metrics").text
    assert 'evergreen_requests_total{route="/admin/policies/{name}",status="200"}' in again
    assert 'evergreen_requests_total{route="unknown",status="404"}' in again


def test_scrapes_count_the_database_once_in_a_while(world: World, monkeypatch: pytest.MonkeyPatch):
    counted: list[str] = []
    stats = metrics.policy_stats

    def slow(session: Session, policy: Policy) -> dict[str, Any]:
        counted.append(policy.name)
        time.sleep(0.2)
        return stats(session, policy)

    def scrape(_: int) -> str:
        with world.http(None) as http:
            return http.get("/metrics").text

    monkeypatch.setattr(metrics, "policy_stats", slow)
    monkeypatch.setattr(world.app.state, "figures", metrics.RecentFigures())
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(scrape, range(8)))
    assert counted.count("default") == 1
    assert all('evergreen_live_version{policy="default"} 0.0' in text for text in texts)
    monkeypatch.setattr(world.app.state.figures, "_kept_until", 0.0)
    scrape(0)
    assert counted.count("default") == 2


def test_swaps_are_quantiles_in_seconds_and_a_number_of_versions(world: World):
    with world.database.read() as session:
        (policy,) = metrics.list_policies(session)[:1]
        figures = metrics.policy_stats(session, policy)
    registry = CollectorRegistry()
    known = {"swap_s": {"median": 1.5, "p99": 4.0, "versions": 7}, "paused_s": {"median": 0.5, "p99": 2.0}}
    registry.register(metrics._Figures([figures | known]))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if line.startswith(("evergreen_swap", "evergreen_weights"))] == [
        f'evergreen_swap_seconds{{policy="{policy.name}",quantile="0.5"}} 1.5',
        f'evergreen_swap_seconds{{policy="{policy.name}",quantile="0.99"}} 4.0',
        f'evergreen_weights_paused_seconds{{policy="{policy.name}",quantile="0.5"}} 0.5',
        f'evergreen_weights_paused_seconds{{policy="{policy.name}",quantile="0.99"}} 2.0',
        f'evergreen_swaps{{policy="{policy.name}"}} 7.0',
    ]


def sampled_tokens(http) -> float:
    """The counter of sampled tokens; it counts for the whole process, so only differences say something."""
    (line,) = (
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith('evergreen_completion_tokens_total{policy="default"}')
    )
    return float(line.split()[-1])


def test_counters_of_several_processes_are_added_up(tmp_path: Path):
    """Two processes count into one directory; the second shows the sum."""
    count = "from app.metrics import REQUESTS, _counters; REQUESTS.labels('/v1/models', '200').inc(2)"
    show = "from prometheus_client import generate_latest; print(generate_latest(_counters()).decode())"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", count], env=environment, check=True)
    shown = subprocess.run(
        [sys.executable, "-c", f"{count}; {show}"], env=environment, check=True, capture_output=True, text=True
    )
    assert 'evergreen_requests_total{route="/v1/models",status="200"} 4.0' in shown.stdout
