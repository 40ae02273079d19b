"""Several processes on one database, and one that is killed in the middle of its commits."""

import signal
import subprocess
import sys
import time
from collections import Counter
from uuid import UUID

from sqlalchemy import select, text

from app.db.models import Interaction
from tests.integration.store.world import World

MODULE = "tests.integration.store.writing_process"


def start(world: World, url: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", MODULE, url, str(world.policy_id), str(world.key.id), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def states(world: World) -> dict[UUID, str]:
    with world.database.read() as session:
        return {row.id: row.state for row in session.execute(select(Interaction.id, Interaction.state))}


def acknowledged(lines: list[str]) -> dict[UUID, str]:
    """id -> the last thing the process was told about it."""
    said = [line.split() for line in lines if line.startswith(("began ", "completed "))]
    return {UUID(identifier): word for word, identifier in said}


def test_processes_that_write_without_a_pause_all_get_their_turn(world: World, url: str) -> None:
    """Two apps in a tight loop, readers in both, and this process writing too: nobody is locked out."""
    writers = [start(world, url, seconds=3) for _ in range(2)]
    mine = 0
    while any(writer.poll() is None for writer in writers):
        world.call()
        mine += 1
    told = []
    for writer in writers:
        output, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
        assert output.endswith("done\n")
        told.append(acknowledged(output.splitlines()))
    stored = states(world)
    assert len(stored) == mine + sum(len(ids) for ids in told)
    assert Counter(stored.values()) == {"completed": len(stored)}
    # nobody is starved: the slower of two equal processes does a fair part of the work
    assert min(len(ids) for ids in told) > max(len(ids) for ids in told) / 4
    assert mine > 10


def test_a_process_that_never_pauses_starves_nobody(world: World, url: str) -> None:
    """SQLite by itself polls and would fail with "database is locked": docs/decisions/0006."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY, url], stdout=subprocess.PIPE, text=True)
    assert busy.stdout is not None
    assert busy.stdout.readline() == "busy\n"
    waits = []
    for _ in range(60):
        time.sleep(0.02)  # an app that is not busy: between its writes the other one takes every turn
        began = time.monotonic()
        world.begin()
        waits.append(time.monotonic() - began)
    assert busy.poll() is None
    busy.kill()
    busy.communicate(timeout=60)
    assert max(waits) < 2


BUSY = """
import sys
from app.db.repositories.events import add_event
from app.db.session import Database

database = Database(sys.argv[1])
for number in range(10**9):
    with database.write() as session:
        for _ in range(20):
            add_event(session, "busy", "x" * 200)
    if number == 20:
        print("busy", flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(world: World, url: str) -> None:
    for _ in range(2):
        process = start(world, url, seconds=60)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(120)]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        stored = states(world)
        # the last line may be cut off; its interaction was not acknowledged then
        whole = [*lines, *rest.splitlines(keepends=True)]
        told = acknowledged([line for line in whole if line.endswith("\n")])
        assert len(told) >= 60
        for identifier, word in told.items():
            assert stored[identifier] in (("completed",) if word == "completed" else ("running", "completed"))
        assert world.call().interaction_id in states(world)
        if world.database.url.get_backend_name() == "sqlite":
            with world.database.read() as session:
                assert session.scalar(text("PRAGMA integrity_check")) == "ok"
