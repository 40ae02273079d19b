"""What two processes do at the same time. On SQLite the write lock keeps them apart, so PostgreSQL only."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from app.db.models import PolicyVersion
from app.db.repositories import retention
from app.db.repositories.policies import create_policy, list_policies
from app.db.repositories.replicas import active_replicas, sync_replicas
from app.db.repositories.retention import take_old_versions
from app.db.repositories.versions import pin_version
from app.db.session import Database
from app.errors import Conflict, NotFound
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


def test_a_version_is_not_pinned_whose_files_retention_takes(
    open_database: Callable[[], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "VERSIONS_KEPT", {"lora": 1})
    first, second = open_database(), open_database()
    with first.write() as session:
        policy = create_policy(session, name="p", base_model="/m", settings=LearningSettings())
        for number in range(3):
            name = f"p-v{number}"
            session.add(PolicyVersion(policy_id=policy.id, number=number, adapter_name=name, path=name, sha256="0"))
        policy.head = policy.live = 2
    asking = threading.Event()

    def pin() -> None:
        with second.write() as session:
            event.listen(session.get_bind(), "before_cursor_execute", lambda *_: asking.set())
            pin_version(session, policy.id, 1, True)

    with ThreadPoolExecutor(1) as pool:
        with first.write() as session:
            assert [version.number for version in take_old_versions(session, policy.id)] == [1]
            pinned = pool.submit(pin)
            assert asking.wait(timeout=30)
            time.sleep(0.3)  # so that its look at the version, if nothing holds it up, is before the commit
        with pytest.raises(NotFound, match="has been deleted"):
            pinned.result(timeout=30)
