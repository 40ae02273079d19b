"""The filesystem transport under concurrent writers, readers and binders, in real processes."""

import json
import multiprocessing
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty

import pytest
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import ChannelError

WRITERS, MESSAGES = 3, 150
BIG = "x" * 300_000
"""Larger than any pipe or page, so that a reader between two writes would meet a part of it."""


def connect(root: Path) -> Connection:
    return Connection(
        "filesystem://",
        transport="app.broker.filesystem:Transport",
        transport_options={
            "data_folder_in": str(root / "queues"),
            "data_folder_out": str(root / "queues"),
            "control_folder": str(root / "exchanges"),
            "polling_interval": 0.01,
        },
    )


def queue(name: str) -> Queue:
    return Queue(name, Exchange(name, type="direct"), routing_key=name)


def write(root: Path, writer: int) -> None:
    with connect(root) as connection:
        producer = connection.Producer(serializer="json")
        for number in range(MESSAGES):
            producer.publish({"id": f"{writer}-{number}", "body": BIG}, exchange="learn", routing_key="learn",
                             declare=[queue("learn")])  # fmt: skip


def read(root: Path, out: Path, done: Event) -> None:
    seen: list[str] = []
    with connect(root) as connection:
        channel = connection.channel()
        queue("learn")(channel).declare()
        while True:
            last = done.is_set()
            message = channel.basic_get("learn", no_ack=True)
            if message is not None:
                payload = message.decode()
                assert payload["body"] == BIG
                seen.append(payload["id"])
            elif last:
                break
    out.write_text(json.dumps(seen))


def bind(root: Path, number: int) -> None:
    with connect(root) as connection:
        channel = connection.channel()
        for step in range(40):
            name = f"q{number}-{step}"
            Queue(name, Exchange("shared", type="direct"), routing_key=name)(channel).declare()


def test_every_message_is_read_whole_and_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    readers = [spawn.Process(target=read, args=(tmp_path, tmp_path / f"seen-{i}", done)) for i in range(2)]
    writers = [spawn.Process(target=write, args=(tmp_path, i)) for i in range(WRITERS)]
    for child in readers + writers:
        child.start()
    for child in writers:
        child.join()
    done.set()
    for child in readers:
        child.join()
    assert [child.exitcode for child in readers + writers] == [0] * 5
    seen = Counter(name for i in range(2) for name in json.loads((tmp_path / f"seen-{i}").read_text()))
    assert seen == Counter(f"{writer}-{number}" for writer in range(WRITERS) for number in range(MESSAGES))


def test_no_binding_is_lost_and_the_table_is_always_whole(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    binders = [spawn.Process(target=bind, args=(tmp_path, i)) for i in range(3)]
    for child in binders:
        child.start()
    table = tmp_path / "exchanges" / "shared.exchange"
    looks = 0
    while any(child.is_alive() for child in binders):
        if table.exists():
            json.loads(table.read_text())
            looks += 1
    assert looks > 10
    assert [child.exitcode for child in binders] == [0, 0, 0]
    assert len(json.loads(table.read_text())) == 3 * 40


def test_purge_counts_the_waiting_and_removes_leftovers_of_a_killed_process(tmp_path: Path) -> None:
    with connect(tmp_path) as connection:
        channel = connection.channel()
        queue("learn")(channel).declare()
        connection.Producer().publish({"a": 1}, exchange="learn", routing_key="learn")
        connection.Producer().publish({"a": 2}, exchange="learn", routing_key="learn")
        folder = tmp_path / "queues" / "learn"
        (folder / ".tmp-0123").write_text('{"half')
        (folder / ".claimed-1-2.msg").write_text("{}")
        assert channel.queue_purge("learn") == 2
        assert list(folder.iterdir()) == []
        with pytest.raises(Empty):
            channel._get("learn")


def test_messages_come_in_the_order_they_were_sent(tmp_path: Path) -> None:
    with connect(tmp_path) as connection:
        channel = connection.channel()
        queue("learn")(channel).declare()
        for number in range(5):
            connection.Producer().publish(number, exchange="learn", routing_key="learn", serializer="json")
        got = [channel.basic_get("learn", no_ack=True).decode() for _ in range(5)]
    assert got == [0, 1, 2, 3, 4]


def test_a_queue_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with connect(tmp_path) as connection, pytest.raises(ChannelError):
        connection.channel()._put("../elsewhere", {})
