"""A PostgreSQL server for tests: the one that answers on its usual port, else one of our own. Never a skip."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

RUNNING = "postgresql://postgres@127.0.0.1:5432/postgres"


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """URL of a server on which databases may be created; `folder` holds the data of one that has to be started."""
    if _answers(RUNNING):
        yield RUNNING
        return
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    found = shutil.which("pg_ctl") or (programs[-1] if programs else None)
    if found is None:
        pytest.fail("the store is tested on PostgreSQL too: run a server on 127.0.0.1:5432, or install its programs")
    with _own_server(Path(found), folder) as url:
        yield url


@contextmanager
def _own_server(pg_ctl: Path, folder: Path) -> Iterator[str]:
    # the server refuses to run as root
    user = "postgres" if os.geteuid() == 0 else None
    folder.mkdir(parents=True)
    if user is not None:
        owner = pwd.getpwnam(user)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(*command: str) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)

    data = str(folder / "data")
    run(str(pg_ctl), "initdb", "-D", data, "-o", "-A trust -U postgres --no-sync")
    options = f"-p {port} -h 127.0.0.1 -k {folder} -F"
    run(str(pg_ctl), "start", "-w", "-D", data, "-l", str(folder / "log"), "-o", options)
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        run(str(pg_ctl), "stop", "-w", "-D", data, "-m", "immediate")


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=3).close()
    except psycopg.OperationalError:
        return False
    return True
