"""Runs the migrations of the installed package `migrations`, without any file in the working directory."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

import migrations

_LOCK = 0x45564752  # "EVGR": an arbitrary number that every Evergreen process agrees on


def migrate(connection: Connection) -> None:
    """Upgrade to the newest revision within the caller's write transaction, one process at a time.

    SQLite's write transactions exclude each other already; PostgreSQL needs a lock of its own.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    command.upgrade(migration_config(connection), "head")


def migration_config(connection: Connection) -> Config:
    """Alembic's configuration for one open connection."""
    config = Config()
    folder = Path(str(migrations.__file__)).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
