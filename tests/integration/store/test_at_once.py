"""Rows that two processes add at the same time. On SQLite the write lock keeps them apart, so PostgreSQL only."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from app.db.repositories.policies import create_policy, list_policies
from app.db.repositories.replicas import active_replicas, sync_replicas
from app.db.session import Database
from app.errors import Conflict
from app.policies.learning import LearningSettings

pytestmark = pytest.mark.parametrize("backend", ["postgresql"])


def second_while_first_is_open(first: Database, second: Database, work: Callable[[Session], object]) -> object:
    """Runs `work` in a transaction of `first`, and in one of `second` that inserts before the first has committed."""
    inserting = threading.Event()

    def watch(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT"):
            inserting.set()

    def run() -> object:
        with second.write() as session:
            event.listen(session.get_bind(), "before_cursor_execute", watch)
            return work(session)

    with ThreadPoolExecutor(1) as pool:
        with first.write() as session:
            work(session)
            session.flush()
            future = pool.submit(run)
            assert inserting.wait(timeout=30)
        return future.result(timeout=30)


def test_a_replica(open_database: Callable[[], Database]) -> None:
    first, second = open_database(), open_database()
    second_while_first_is_open(first, second, lambda session: sync_replicas(session, ["http://one"]))
    with first.read() as session:
        assert [replica.url for replica in active_replicas(session)] == ["http://one"]


def test_a_policy(open_database: Callable[[], Database]) -> None:
    first, second = open_database(), open_database()
    with pytest.raises(Conflict, match="a policy named 'p' exists"):
        second_while_first_is_open(
            first,
            second,
            lambda session: create_policy(session, name="p", base_model="/m", settings=LearningSettings()),
        )
    with first.read() as session:
        assert [policy.name for policy in list_policies(session)] == ["p"]
