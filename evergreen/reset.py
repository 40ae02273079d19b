"""`evergreen reset`: forget everything that a home has learned. The converted base model stays."""

import shutil
from pathlib import Path

from app.settings import Settings
from evergreen.home import HomeLock, was_held

FILES = (
    "admin.key",
    "evergreen.db",
    "evergreen.db-wal",
    "evergreen.db-shm",
    "evergreen.db-write-turn",
    "processes.json",
)
FOLDERS = ("artifacts", "broker", "logs")


class NotOurs(RuntimeError):
    """What would be deleted is not a server's, or not all of its state; the message says which and why."""


def what_reset_deletes(settings: Settings) -> list[Path]:
    """
    Raises:
        NotOurs: DATABASE_URL points outside the home, or no server has ever run in this directory.
    """
    if settings.database_url_setting:
        raise NotOurs(
            "DATABASE_URL is set, so the state is not in the home alone. Drop that database yourself, and delete "
            f"{settings.artifacts_dir} with it: one without the other is of no use."
        )
    home = settings.home.resolve()
    found = [home / name for name in (*FILES, *FOLDERS) if (home / name).exists()]
    if found and not was_held(home):
        raise NotOurs(
            f"{home} has never been the home of a server, so {', '.join(path.name for path in found)} in it is not "
            "ours to delete. EVERGREEN_HOME names the home."
        )
    return found


def reset(settings: Settings) -> None:
    """
    Raises:
        HomeInUse: `up` runs. NotOurs: see `what_reset_deletes`.
    """
    lock = HomeLock(settings.home.resolve())
    for path in what_reset_deletes(settings):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    lock.release()
