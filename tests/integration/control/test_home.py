"""The home's lock, busy ports, and `reset`."""

import fcntl
import os
import socket
import sys
from pathlib import Path
from threading import Timer

import httpx
import pytest
from typer.testing import CliRunner

from app.settings import Settings, get_settings
from evergreen.cli import app
from evergreen.home import HomeInUse, HomeLock, is_held
from evergreen.own_server import NotReady
from evergreen.ports import PortBusy, require_free
from evergreen.reset import NotOurs, reset, what_reset_deletes
from evergreen.stack import base_url
from tests.integration.control.processes import eventually, process


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERGREEN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    get_settings.cache_clear()
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    get_settings.cache_clear()


def test_a_home_has_one_holder_who_is_named(home: Path) -> None:
    lock = HomeLock(home)
    assert is_held(home)
    with pytest.raises(HomeInUse, match=f"in use by process {os.getpid()}"):
        HomeLock(home)
    lock.release()
    assert not is_held(home)


def test_a_look_at_the_lock_is_in_nobodys_way(home: Path) -> None:
    HomeLock(home).release()
    written = (home / "up.lock").read_text()
    with (home / "up.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_held(home), "another look is no holder"
        assert (home / "up.lock").read_text() == written
        ending = Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        ending.start()
        HomeLock(home).release()
        ending.join()


def test_the_lock_dies_with_its_holder(home: Path, tmp_path: Path) -> None:
    code = (f"from pathlib import Path; from evergreen.home import HomeLock; lock = HomeLock(Path({str(home)!r})); "
            "import time; time.sleep(1000)")  # fmt: skip
    with process([sys.executable, "-c", code], tmp_path / "holder.log") as holder:
        eventually(lambda: is_held(home), within_s=10, what="the lock")
        holder.kill()
        holder.wait()
    HomeLock(home).release()


def test_demo_says_which_server_it_waits_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(url: str, up: object) -> None:
        raise NotReady(f"nothing at {url}")

    monkeypatch.setattr("evergreen.demo.wait_until_ready", gives_up)
    lock = HomeLock(home)
    waited = CliRunner().invoke(app, ["demo"])
    lock.release()
    assert waited.exit_code == 1
    assert f"A server runs on {home}; waiting for it at http://127.0.0.1:8000." in waited.output
    assert "EVERGREEN_PORT" in waited.output
    assert "nothing at http://127.0.0.1:8000" in waited.output


def test_a_busy_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortBusy) as busy:
            require_free("127.0.0.1", port, "EVERGREEN_PORT")
    message = str(busy.value)
    assert f"port {port} on 127.0.0.1" in message
    assert f"process {os.getpid()}" in message
    assert "Set EVERGREEN_PORT" in message
    require_free("127.0.0.1", port, "EVERGREEN_PORT")


def test_up_refuses_a_held_home_and_a_busy_port(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = HomeLock(home)
    refused = CliRunner().invoke(app, ["up"])
    assert isinstance(refused.exception, HomeInUse)
    lock.release()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("EVERGREEN_PORT", str(server.getsockname()[1]))
        get_settings.cache_clear()
        refused = CliRunner().invoke(app, ["up"])
    assert isinstance(refused.exception, PortBusy)


def test_up_refuses_one_port_for_app_and_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERGREEN_PORT", "EVERGREEN_ENGINE_PORT"):
        monkeypatch.setenv(name, "8123")
    get_settings.cache_clear()
    refused = CliRunner().invoke(app, ["up"])
    assert isinstance(refused.exception, PortBusy)
    assert "EVERGREEN_PORT and EVERGREEN_ENGINE_PORT are both 8123" in str(refused.exception)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("box.local", "http://box.local:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_the_app_is_reached_under_a_url_that_is_one(host: str, url: str) -> None:
    assert base_url(Settings(host=host, port=8000)) == url
    assert httpx.URL(url).port == 8000


def test_reset_asks_deletes_what_was_learned_and_keeps_the_base_model(home: Path) -> None:
    for name in ("artifacts/default/versions/v0", "logs", "models/base"):
        (home / name).mkdir(parents=True)
    for name in ("evergreen.db", "evergreen.db-wal", "admin.key", "notes.txt"):
        (home / name).write_text("x")
    refused = CliRunner().invoke(app, ["reset"], input="n\n")
    assert refused.exit_code != 0
    assert (home / "evergreen.db").exists()
    assert str(home / "evergreen.db") in refused.output

    done = CliRunner().invoke(app, ["reset"], input="y\n")
    assert done.exit_code == 0
    assert sorted(path.name for path in home.iterdir()) == ["models", "notes.txt", "up.lock"]


def test_reset_refuses_while_up_runs(home: Path) -> None:
    (home / "evergreen.db").write_text("x")
    lock = HomeLock(home)
    refused = CliRunner().invoke(app, ["reset", "--yes"])
    lock.release()
    assert isinstance(refused.exception, HomeInUse)
    assert "This deletes" not in refused.output
    assert (home / "evergreen.db").exists()


def test_reset_leaves_a_directory_alone_that_was_never_a_home(home: Path) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "mine.log").write_text("x")
    refused = CliRunner().invoke(app, ["reset", "--yes"])
    assert isinstance(refused.exception, NotOurs)
    assert "logs" in str(refused.exception)
    with pytest.raises(NotOurs):
        reset(get_settings(), print)
    assert sorted(path.name for path in home.rglob("*")) == ["logs", "mine.log"]
    HomeLock(home).release()  # an `up` that was refused leaves its lock's file
    with pytest.raises(NotOurs):
        reset(get_settings(), print)


def test_reset_empties_a_folder_that_is_a_link_to_another_disk(home: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "default").mkdir(parents=True)
    (tmp_path / "disk" / "default" / "weights").write_text("x")
    (home / "artifacts").symlink_to(tmp_path / "disk")
    (home / "admin.key").write_text("x")
    reset(get_settings(), print)
    assert sorted(path.name for path in home.iterdir()) == ["artifacts", "up.lock"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_reset_refuses_a_database_elsewhere(home: Path) -> None:
    with pytest.raises(NotOurs, match="DATABASE_URL"):
        what_reset_deletes(Settings(home=home, DATABASE_URL="postgresql://x@y/z"))


def test_settings_that_cannot_be_used_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGREEN_PORT", "eighty")
    get_settings.cache_clear()
    refused = CliRunner().invoke(app, ["up"])
    assert refused.exit_code == 1
    assert "port: Input should be a valid integer" in refused.stderr
