"""`evergreen up`: the whole server in the foreground, for one home directory."""

import os
import shutil
import subprocess
import sys

import typer

from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.settings import DEFAULT_POLICY, Settings
from evergreen.child import die_with
from evergreen.home import HomeLock
from evergreen.ports import require_apart, require_free
from evergreen.stack import base_url, specs
from evergreen.supervisor import Supervisor


def up(settings: Settings) -> None:
    """Returns after a drain (Ctrl-C or SIGTERM).

    Raises:
        HomeInUse, PortBusy: another server is in the way. typer.Exit: preparing failed, and said why.
    """
    home = settings.home.resolve()
    lock = HomeLock(home)
    require_apart(settings)
    require_free(settings.host, settings.port, "EVERGREEN_PORT")
    if not settings.engine_urls:
        require_free("127.0.0.1", settings.engine_port, "EVERGREEN_ENGINE_PORT")
    typer.echo(f"Preparing {home} ...")
    _prepare()
    shutil.rmtree(settings.broker_dir, ignore_errors=True)  # old wake-ups, nothing else
    supervisor = Supervisor(
        home,
        specs(settings, _base_model(settings)),
        ready_url=f"{base_url(settings)}/readyz",
        on_ready=lambda: _say_ready(settings),
        say=lambda line: typer.echo(f"[evergreen] {line}"),
    )
    typer.echo(f"Starting {', '.join(child.spec.name for child in supervisor.children)}; logs in {home / 'logs'}")
    supervisor.run()
    typer.echo("Stopped.")
    lock.release()


def _prepare() -> None:
    """In a process of its own: it needs torch, which the supervisor should not hold in memory."""
    done = subprocess.run([sys.executable, "-P", "-m", "evergreen.cli", "prepare"], preexec_fn=die_with(os.getpid()))
    if done.returncode != 0:
        raise typer.Exit(1)


def _base_model(settings: Settings) -> str:
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    try:
        with database.read() as session:
            return get_policy(session, DEFAULT_POLICY).base_model
    finally:
        database.close()


def _say_ready(settings: Settings) -> None:
    url, key = base_url(settings), settings.admin_key_path
    body = f'{{"model": "{DEFAULT_POLICY}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    typer.echo(
        f"\nEvergreen is ready at {url}\n"
        f"  model  {DEFAULT_POLICY} ({settings.model})\n"
        f"  key    {key}\n"
        f"  try    curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'           -H "Authorization: Bearer $(cat {key})" \\\n'
        f"           -d '{body}'\n"
        "Ctrl-C stops it.\n"
    )
