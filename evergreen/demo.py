"""`evergreen demo`: tickets played against a server, started as a child unless one runs already."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from app.settings import Settings
from evergreen.child import die_with
from evergreen.home import is_held
from evergreen.own_server import NotReady, evergreen, wait_until_ready
from evergreen.stack import DRAIN_S, base_url


def demo(settings: Settings, seed: int, out: Path, options: Sequence[str]) -> int:
    """Returns the simulation's exit status.

    Args:
        options: passed on to `evergreen simulate tickets`.
    """
    with _server(settings) as server:
        if server is None:
            typer.echo(
                f"A server runs on {settings.home.resolve()}; waiting for it at {base_url(settings)}. If it was "
                "started with another EVERGREEN_PORT, give this command the same one."
            )
        try:
            wait_until_ready(base_url(settings), server)
        except NotReady as error:  # a child has said why
            typer.echo(str(error), err=True)
            return 1
        environment = {
            "EVERGREEN_URL": base_url(settings),
            "EVERGREEN_API_KEY": settings.admin_key_path.read_text().strip(),
        }
        command = [*evergreen("simulate", "tickets"), "--seed", str(seed), "--out", str(out), *options]
        typer.echo(f"Playing; results go to {out}")
        player = subprocess.Popen(command, env=os.environ | environment, preexec_fn=die_with(os.getpid()))
        status = _status_of(player)
        typer.echo(f"Results: {out}")
        return status


def _status_of(player: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches the player too, and it writes what it has measured before it ends."""
    while True:
        try:
            return player.wait()
        except KeyboardInterrupt:
            typer.echo("Writing what was measured ...")


@contextmanager
def _server(settings: Settings) -> Iterator[subprocess.Popen[bytes] | None]:
    """None: the one that runs in this home is used, and left running."""
    if is_held(settings.home.resolve()):
        yield None
        return
    server = subprocess.Popen(evergreen("up"), process_group=0, preexec_fn=die_with(os.getpid()))
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=3 * DRAIN_S)
