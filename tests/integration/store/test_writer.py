"""Group commit: neighbours do not harm each other, clashes are replayed, nothing accepted is dropped."""

import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from uuid import UUID

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from app.db import writer as writer_module
from app.db.models import Event, Interaction, Rollout
from app.db.repositories.events import add_event
from app.db.session import Database
from app.db.writer import StoreUnavailable, Writer, WriterDied, WriterFull, WriterStopped
from tests.integration.store.world import World

T = TypeVar("T")
WAIT_S = 60


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    writer = Writer(database)
    writer.start()
    yield writer
    writer.stop()


class Gate:
    """Holds the writer inside one item, so that what is submitted meanwhile becomes one group."""

    def __init__(self, writer: Writer) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.future = writer.submit(self._wait, order=UUID(int=0))
        assert self.reached.wait(WAIT_S)

    def _wait(self, _session: Session) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)

    def open(self) -> None:
        self.opened.set()
        self.future.result(WAIT_S)


def note(kind: str) -> Callable[[Session], str]:
    return lambda session: add_event(session, kind, "message").kind


def kinds(database: Database) -> list[str]:
    with database.read() as session:
        return sorted(session.scalars(select(Event.kind)))


def test_a_result_is_there_only_after_the_commit(
    writer: Writer, database: Database, open_database: Callable[[], Database]
) -> None:
    assert writer.submit(note("one"), order=uuid7()).result(WAIT_S) == "one"
    assert kinds(open_database()) == ["one"]


def test_what_queues_meanwhile_shares_one_transaction_in_the_order_of_ids(writer: Writer, database: Database) -> None:
    commits: list[None] = []
    gate = Gate(writer)
    event.listen(database._writing, "commit", lambda _: commits.append(None))
    ran: list[int] = []
    futures = [writer.submit(partial(_note_that_it_ran, ran, i), order=UUID(int=i)) for i in (3, 1, 2)]
    gate.open()
    for future in futures:
        future.result(WAIT_S)
    assert ran == [1, 2, 3]
    assert len(commits) == 2  # the gate's, and one for the three


def _note_that_it_ran(ran: list[int], number: int, _session: Session) -> None:
    ran.append(number)


def test_a_bad_item_fails_alone(writer: Writer, database: Database) -> None:
    def refuse(session: Session) -> None:
        add_event(session, "undone", "message")
        raise ValueError("no")

    def break_a_constraint(session: Session) -> None:
        add_event(session, "undone", "message")
        session.add(Event(kind="x", message="m", policy_id=uuid7()))
        session.flush()

    gate = Gate(writer)
    before, refused, broken, after = (
        writer.submit(work, order=UUID(int=i))
        for i, work in enumerate((note("before"), refuse, break_a_constraint, note("after")))
    )
    gate.open()
    assert before.result(WAIT_S) == "before"
    assert after.result(WAIT_S) == "after"
    with pytest.raises(ValueError, match="no"):
        refused.result(WAIT_S)
    with pytest.raises(IntegrityError):
        broken.result(WAIT_S)
    assert kinds(database) == ["after", "before"]


def test_a_caller_who_gave_up_is_passed(writer: Writer, database: Database) -> None:
    gate = Gate(writer)
    given_up, other = writer.submit(note("given up"), order=uuid7()), writer.submit(note("other"), order=uuid7())
    assert given_up.cancel()
    gate.open()
    other.result(WAIT_S)
    with pytest.raises(CancelledError):
        given_up.result(WAIT_S)
    assert kinds(database) == ["other"]


def test_stopping_commits_what_is_queued(database: Database) -> None:
    writer = Writer(database)
    writer.start()
    gate = Gate(writer)
    futures = [writer.submit(note(str(i)), order=uuid7()) for i in range(200)]
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    gate.open()
    stopping.join(WAIT_S)
    assert all(future.done() for future in futures)
    assert len(kinds(database)) == 200
    with pytest.raises(WriterStopped, match="shutting down"):
        writer.submit(note("late"), order=uuid7())
    writer.stop()


def test_a_full_queue_refuses_and_recovers(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED", 2)
    writer = Writer(database)
    writer.start()
    gate = Gate(writer)
    accepted = [writer.submit(note("accepted"), order=uuid7()) for _ in range(2)]
    with pytest.raises(WriterFull, match="try again") as caught:
        writer.submit(note("refused"), order=uuid7())
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "2"})
    gate.open()
    for future in accepted:
        future.result(WAIT_S)
    writer.submit(note("accepted"), order=uuid7()).result(WAIT_S)
    writer.stop()
    assert kinds(database) == ["accepted"] * 3


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_deadlocked_group_is_replayed(world: World, open_database: Callable[[], Database]) -> None:
    """PostgreSQL ends the transaction that has waited longest: here the writer's."""
    first, second = world.call().rollout_id, world.call().rollout_id
    writer = Writer(world.database)
    other = open_database()
    attempts: list[None] = []
    holds_first, holds_second = threading.Event(), threading.Event()

    def lock(session: Session, rollout_id: UUID) -> None:
        session.execute(select(Rollout.id).where(Rollout.id == rollout_id).with_for_update())

    def both(session: Session) -> None:
        attempts.append(None)
        add_event(session, "once", "message")
        lock(session, first)
        holds_first.set()
        assert holds_second.wait(WAIT_S)
        lock(session, second)

    def the_other_way_round() -> None:
        with other.write() as session:
            lock(session, second)
            assert holds_first.wait(WAIT_S)
            holds_second.set()
            # the writer must be the one that waits longer
            with world.database.read() as observer:
                waiting = text(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
                while not observer.execute(waiting).scalar_one():
                    observer.rollback()
            session.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            lock(session, first)

    writer.start()
    with ThreadPoolExecutor(1) as pool:
        rival = pool.submit(the_other_way_round)
        future = writer.submit(both, order=first)
        neighbour = writer.submit(note("neighbour"), order=second)
        future.result(WAIT_S)
        neighbour.result(WAIT_S)
        rival.result(WAIT_S)
    writer.stop()
    assert len(attempts) == 2
    assert kinds(world.database) == ["neighbour", "once"]


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_lost_connection_fails_the_group_and_not_the_writer(database: Database) -> None:
    def die(session: Session) -> None:
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    writer = Writer(database)
    writer.start()
    gate = Gate(writer)
    neighbour, dying = writer.submit(note("lost"), order=UUID(int=1)), writer.submit(die, order=UUID(int=2))
    gate.open()
    for future in (neighbour, dying):
        with pytest.raises(StoreUnavailable, match="not confirmed"):
            future.result(WAIT_S)
    writer.submit(note("kept"), order=uuid7()).result(WAIT_S)
    writer.stop()
    assert kinds(database) == ["kept"]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_turn_to_write_that_cannot_be_had_fails_the_group_and_not_the_writer(
    writer: Writer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def no_locks(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreUnavailable, match="not confirmed"):
        writer.submit(note("lost"), order=uuid7()).result(WAIT_S)
    writer.submit(note("kept"), order=uuid7()).result(WAIT_S)
    assert not writer.died
    assert kinds(database) == ["kept"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_leaves_nobody_waiting(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_GROUP", 1)
    writer = Writer(database)
    writer.start()
    gate = Gate(writer)

    def unforeseen(connection: object, item: object) -> None:
        raise AssertionError("unforeseen")

    accepted = [writer.submit(note("lost"), order=uuid7()) for _ in range(3)]
    monkeypatch.setattr(writer_module, "_run_item", unforeseen)
    gate.open()
    for future in accepted:
        with pytest.raises(WriterDied, match="restart"):
            future.result(WAIT_S)
    assert writer.died
    with pytest.raises(WriterDied):
        writer.submit(note("late"), order=uuid7())
    writer.stop()
    assert kinds(database) == []


class Through(World):
    """A world whose writes are queued."""

    def __init__(self, world: World, writer: Writer) -> None:
        self.__dict__ |= world.__dict__
        self.writer = writer

    def write(self, work: Callable[[Session], T]) -> T:
        return self.writer.submit(work, order=uuid7()).result(WAIT_S)


def test_many_threads_call_and_reward_through_two_writers(world: World, open_database: Callable[[], Database]) -> None:
    """Two apps' writers on the same named rollouts: every call is stored once and every rollout is ready."""
    writers = [Writer(world.database), Writer(open_database())]
    for writer in writers:
        writer.start()
    rollouts, turns = 12, 3

    def play(number: int) -> list[UUID]:
        stories: list[UUID] = []
        for turn in range(turns):
            submit = Through(world, writers[(number + turn) % 2])
            begun = submit.call(f"episode-{number % rollouts}", [number, turn])
            stories.append(begun.interaction_id)
        return stories

    with ThreadPoolExecutor(2 * rollouts) as pool:
        acknowledged = [i for ids in pool.map(play, range(2 * rollouts)) for i in ids]
        answers = list(
            pool.map(lambda n: Through(world, writers[n % 2]).feedback(1.0, rollout=f"episode-{n}"), range(rollouts))
        )
    for writer in writers:
        writer.stop()
    assert {answer["rollout"]["state"] for answer in answers} == {"ready"}
    with world.database.read() as session:
        assert sorted(session.scalars(select(Interaction.id))) == sorted(acknowledged)
        assert session.scalar(select(func.count()).select_from(Rollout)) == rollouts


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_transaction_that_the_database_ended_acknowledges_nothing_of_its_group(
    writer: Writer, database: Database
) -> None:
    """On a full disk SQLite rolls the whole transaction back, not only what one item did since its savepoint."""

    def too_much(session: Session) -> None:
        connection = session.connection().connection.dbapi_connection
        assert connection is not None
        connection.rollback()
        session.add(Event(kind=None, message="a statement that fails, and with it the rollback to its savepoint"))
        session.flush()

    gate = Gate(writer)
    group = [writer.submit(work, order=UUID(int=n)) for n, work in enumerate((note("one"), too_much, note("two")), 1)]
    gate.open()
    for future in group:
        with pytest.raises(StoreUnavailable, match="not confirmed"):
            future.result(WAIT_S)
    assert kinds(database) == []
    writer.submit(note("kept"), order=uuid7()).result(WAIT_S)
    assert not writer.died
    assert kinds(database) == ["kept"]
