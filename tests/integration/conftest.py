"""The services that several parts' tests talk to."""

from collections.abc import Iterator

import pytest

from tests.brokers import rabbitmq_server, redis_server
from tests.postgres import postgres_server


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Without a database number."""
    with redis_server(tmp_path_factory.mktemp("redis") / "server") as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq") / "server") as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of its maintenance database; tests create their own beside it."""
    with postgres_server(tmp_path_factory.mktemp("postgres") / "server") as url:
        yield url
