"""The supervisor over real processes: restarts, deaths together, drains, logs."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from evergreen.child import LOG_LIMIT_BYTES, RESTART_DELAYS_S, Child, ChildSpec
from evergreen.home import read_states
from tests.integration.control.fake_engine import running_engine
from tests.integration.control.processes import eventually, process

SLEEP = "import time\nprint('here', flush=True)\ntime.sleep(1000)"
NOBODY = "http://127.0.0.1:9/readyz"


@contextmanager
def supervised(home: Path, *children: str, ready_url: str = NOBODY) -> Iterator[Popen[bytes]]:
    command = [sys.executable, "-m", "tests.integration.control.supervised", str(home), ready_url, *children]
    with process(command, home / "console") as supervisor:
        yield supervisor


def pid_of(home: Path, name: str) -> int | None:
    return {state.name: state.pid for state in read_states(home)}.get(name)


def alive(pid: int) -> bool:
    """Running, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_pid(home: Path, name: str, other_than: int | None = None, within_s: float = 10) -> int:
    eventually(lambda: pid_of(home, name) not in (None, other_than), within_s=within_s, what=f"{name} to run")
    pid = pid_of(home, name)
    assert pid is not None
    return pid


def test_a_killed_child_is_back_at_once_and_its_siblings_are_left_alone(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}", f"two={SLEEP}"):
        first, sibling = wait_for_pid(tmp_path, "one"), wait_for_pid(tmp_path, "two")
        killed_at = time.monotonic()
        os.killpg(first, signal.SIGKILL)
        second = wait_for_pid(tmp_path, "one", other_than=first)
        assert time.monotonic() - killed_at < 2
        assert alive(second)
        assert pid_of(tmp_path, "two") == sibling
        state = read_states(tmp_path)[0]
        assert (state.deaths, state.last_death, state.keeps_dying) == (1, "killed by SIGKILL", False)
    assert "one killed by SIGKILL; it is started again now" in (tmp_path / "console").read_text()


def test_all_children_killed_at_once_are_back(tmp_path: Path) -> None:
    names = ("one", "two", "three")
    with supervised(tmp_path, *(f"{name}={SLEEP}" for name in names)):
        before = {name: wait_for_pid(tmp_path, name) for name in names}
        for pid in before.values():
            os.killpg(pid, signal.SIGKILL)
        for name in names:
            wait_for_pid(tmp_path, name, other_than=before[name])


def test_children_die_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}", f"two={SLEEP}") as supervisor:
        pids = [wait_for_pid(tmp_path, name) for name in ("one", "two")]
        supervisor.kill()  # SIGKILL: it can do nothing about it any more
        supervisor.wait()
        eventually(lambda: not any(alive(pid) for pid in pids), within_s=5, what="the children's end")


def test_sigterm_stops_the_children_in_order_and_kills_one_that_does_not_listen(tmp_path: Path) -> None:
    log_the_end = (
        "import signal, sys, time\n"
        "def end(*_):\n    open('order', 'a').write(NAME + ' ')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nopen(NAME, 'w').close()\ntime.sleep(1000)"
    )
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('deaf', 'w').close()\n"
        "time.sleep(1000)"
    )
    children = [f"first=NAME='1st'\n{log_the_end}", f"deaf={deaf}", f"last=NAME='3rd'\n{log_the_end}"]
    with supervised(tmp_path, *children) as supervisor:
        for started in ("1st", "deaf", "3rd"):
            eventually((tmp_path / started).exists, within_s=10, what=f"{started} to start")
        deaf_pid = wait_for_pid(tmp_path, "deaf")
        supervisor.terminate()
        assert supervisor.wait(timeout=10) == 0
        assert (tmp_path / "order").read_text() == "1st 3rd "
        assert not alive(deaf_pid)
        assert [state.pid for state in read_states(tmp_path)] == [None, None, None]


def test_a_child_that_keeps_dying_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with supervised(tmp_path, "bad=raise SystemExit('no such model')"):
        eventually(lambda: any(state.keeps_dying for state in read_states(tmp_path)), within_s=15, what="three deaths")
        state = read_states(tmp_path)[0]
        assert state.last_death == "ended with status 1"
        assert state.last_lines[-1] == "no such model"
    console = (tmp_path / "console").read_text()
    assert "bad keeps dying" in console
    assert "    no such model" in console


def test_a_home_that_cannot_be_written_to_ends_nobody(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}") as supervisor:
        first = wait_for_pid(tmp_path, "one")
        (tmp_path / "processes.json").unlink()
        (tmp_path / "processes.json").mkdir()  # nothing can be put in its place
        os.killpg(first, signal.SIGKILL)
        console = tmp_path / "console"
        eventually(lambda: "cannot be written to" in console.read_text(), within_s=10, what="the complaint")
        (tmp_path / "processes.json").rmdir()
        assert alive(wait_for_pid(tmp_path, "one", other_than=first))
        assert supervisor.poll() is None
        assert console.read_text().count("cannot be written to") == 1
        assert not list(tmp_path.glob(".tmp-*"))


def test_a_console_that_takes_nothing_ends_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.control.supervised", str(tmp_path), NOBODY, f"one={SLEEP}"]
    with process(command, Path("/dev/full")) as supervisor:
        first = wait_for_pid(tmp_path, "one")
        os.killpg(first, signal.SIGKILL)
        assert alive(wait_for_pid(tmp_path, "one", other_than=first))
        assert supervisor.poll() is None


def test_a_start_that_fails_is_a_death_and_is_tried_again(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}") as supervisor:
        first = wait_for_pid(tmp_path, "one")
        (tmp_path / "logs" / "one.log").unlink()
        (tmp_path / "logs" / "one.log").mkdir()  # Child.start opens it first
        os.killpg(first, signal.SIGKILL)
        said = "one could not be started"
        eventually(lambda: said in (tmp_path / "console").read_text(), within_s=10, what="the failed start")
        (tmp_path / "logs" / "one.log").rmdir()
        assert alive(wait_for_pid(tmp_path, "one", other_than=first))
        assert supervisor.poll() is None


def test_a_url_that_is_none_ends_nobody(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}", ready_url="http://::1:8000/readyz") as supervisor:
        wait_for_pid(tmp_path, "one")
        time.sleep(1.5)
        assert supervisor.poll() is None


@pytest.mark.parametrize(("ignored", "ends"), [(signal.SIGHUP, False), (signal.SIGINT, False), (signal.SIGTERM, True)])
def test_what_was_ignored_at_the_start_stays_ignored_but_for_sigterm(
    tmp_path: Path, ignored: signal.Signals, ends: bool
) -> None:
    before = signal.signal(ignored, signal.SIG_IGN)  # inherited, as from nohup
    try:
        with supervised(tmp_path, f"one={SLEEP}") as supervisor:
            signal.signal(ignored, before)
            wait_for_pid(tmp_path, "one")
            supervisor.send_signal(ignored)
            if ends:
                assert supervisor.wait(timeout=10) == 0
            else:
                time.sleep(0.5)
                assert supervisor.poll() is None
    finally:
        signal.signal(ignored, before)


def test_a_child_has_its_own_group_in_the_supervisors_session(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}") as supervisor:
        child = wait_for_pid(tmp_path, "one")
        assert os.getpgid(child) == child, "a Ctrl-C does not reach it"
        assert os.getsid(child) == os.getsid(supervisor.pid), "nice compares it with its siblings"


def test_readiness_is_announced_once(tmp_path: Path) -> None:
    with running_engine() as engine, supervised(tmp_path, f"one={SLEEP}", ready_url=f"{engine.url}/health"):
        eventually(lambda: "READY" in (tmp_path / "console").read_text(), within_s=10, what="readiness")
        first = wait_for_pid(tmp_path, "one")
        os.kill(first, signal.SIGKILL)
        wait_for_pid(tmp_path, "one", other_than=first)
        assert (tmp_path / "console").read_text().count("READY") == 1


def test_output_is_appended_to_one_log_per_child_over_restarts(tmp_path: Path) -> None:
    with supervised(tmp_path, f"one={SLEEP}"):
        log = tmp_path / "logs" / "one.log"
        first = wait_for_pid(tmp_path, "one")
        eventually(lambda: log.read_text() == "here\n", within_s=10, what="a line")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: log.read_text() == "here\nhere\n", within_s=10, what="a second line")


def test_a_log_that_grew_too_long_is_put_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    writer = ChildSpec("one", [sys.executable, "-c", "print('after', flush=True) if input() else 0"])
    child = Child(writer, tmp_path, log)
    with log.open("wb") as file:
        file.truncate(LOG_LIMIT_BYTES + 1)
    with log.open("ab") as open_all_along:
        child.rotate_log()
        assert (tmp_path / "one.log.1").stat().st_size == LOG_LIMIT_BYTES + 1
        open_all_along.write(b"after\n")
    assert log.read_bytes() == b"after\n"


def test_the_first_restart_is_immediate_and_the_longest_wait_leaves_room_within_a_minute() -> None:
    assert RESTART_DELAYS_S[0] == 0
    assert list(RESTART_DELAYS_S) == sorted(RESTART_DELAYS_S)
    assert RESTART_DELAYS_S[-1] <= 15


def test_a_child_gets_its_own_environment(tmp_path: Path) -> None:
    code = "import os; print(os.environ['COLOUR'], os.environ['PATH'] != '')"
    child = Child(ChildSpec("one", [sys.executable, "-c", code], {"COLOUR": "green"}), tmp_path, tmp_path / "one.log")
    child.start()
    eventually(child.died, within_s=10, what="its end")
    assert (tmp_path / "one.log").read_text() == "green True\n"
