"""`evergreen reset`: forget everything that a home has learned. The converted base model stays."""

import shutil
from collections.abc import Callable
from pathlib import Path

from app.settings import Settings
from evergreen.home import HomeLock

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
        NotOurs: DATABASE_URL points outside the home, or this directory is none.
    """
    if settings.database_url_setting:
        raise NotOurs(
            "DATABASE_URL is set, so the state is not in the home alone. Drop that database yourself, and delete "
            f"{settings.artifacts_dir} with it: one without the other is of no use."
        )
    home = settings.home.resolve()
    files, folders = ([home / name for name in names if (home / name).exists()] for names in (FILES, FOLDERS))
    if folders and not files:
        names = ", ".join(path.name for path in folders)
        raise NotOurs(
            f"{home} has nothing in it that only a server's home has, so {names} may be yours. "
            "EVERGREEN_HOME names the home; if this is what is left of one, delete that yourself."
        )
    return [*folders, *files]  # the files last: as long as one is there, a reset that broke off can be repeated


def reset(settings: Settings, confirm: Callable[[list[Path]], None]) -> None:
    """confirm: is shown what will be deleted, and raises to leave it there.

    Raises:
        HomeInUse: `up` runs. NotOurs: see `what_reset_deletes`.
    """
    what_reset_deletes(settings)  # before the lock puts its file there
    lock = HomeLock(settings.home.resolve())
    try:
        paths = what_reset_deletes(settings)
        confirm(paths)
        for path in paths:
            if path.is_dir():
                _empty(path)
            else:
                path.unlink()
    finally:
        lock.release()


def _empty(folder: Path) -> None:
    """A link to another disk stays, and what it led to goes."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not folder.is_symlink():
        folder.rmdir()
