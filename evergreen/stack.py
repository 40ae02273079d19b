"""The processes of the embedded server: their command lines and environments."""

import sys
from pathlib import Path

from sqlalchemy import make_url

from app.celery_app import beat_command, worker_command
from app.engine.wire import KEEP_ALIVE_S
from app.settings import Settings
from evergreen.child import ChildSpec

DRAIN_S = 30.0
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""OpenMP threads that wait sleep: engine and learner share the cores. How many each has is its own default."""


def base_url(settings: Settings) -> str:
    """Where this machine reaches the app; an app on all addresses is reached on the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def specs(settings: Settings, base_model: str) -> list[ChildSpec]:
    """Engine (unless EVERGREEN_ENGINE_URLS names some), app, learn worker, control worker, beat."""
    heavy = _environment(settings) | PASSIVE
    light = heavy | {"OMP_NUM_THREADS": "1"}
    processes = [
        ChildSpec("app", _app_command(settings), light, stop_phase=0, stop_within_s=DRAIN_S + 5),
        ChildSpec("beat", beat_command(), light, stop_phase=1),
        ChildSpec("control", worker_command("control"), light, stop_phase=1),
        # it makes itself nice once it has started, so that it is back soon on a busy machine; an update that is
        # running when it is told to stop ends first, if it is quick enough
        ChildSpec("learn", worker_command("learn"), heavy, stop_phase=1, stop_within_s=DRAIN_S),
    ]
    if not settings.engine_urls:
        engine = ChildSpec("engine", _engine_command(settings, base_model), heavy, stop_phase=2)
        processes.insert(0, engine)
    return processes


def _environment(settings: Settings) -> dict[str, str]:
    """What children need besides the parent's environment; they run in another working directory."""
    environment = {"EVERGREEN_HOME": str(settings.home.resolve()), "PYTHONUNBUFFERED": "1",
                   "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    if Path(settings.model).expanduser().is_dir():
        environment["EVERGREEN_MODEL"] = str(Path(settings.model).expanduser().resolve())
    if settings.database_url_setting:
        url = make_url(settings.database_url_setting)
        if url.get_backend_name() == "sqlite" and url.database:
            url = url.set(database=str(Path(url.database).resolve()))
        environment["DATABASE_URL"] = url.render_as_string(hide_password=False)
    return environment


def _app_command(settings: Settings) -> list[str]:
    return [sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--no-access-log",
            "--host", settings.host, "--port", str(settings.port),
            "--timeout-keep-alive", str(KEEP_ALIVE_S), "--timeout-graceful-shutdown", f"{DRAIN_S:.0f}"]  # fmt: skip


def _engine_command(settings: Settings, base_model: str) -> list[str]:
    return [sys.executable, "-m", "app.engine.embedded", "--model", base_model, "--port",
            str(settings.engine_port), "--dtype", settings.dtype]  # fmt: skip
