"""Alembic's entry: on the connection it is given (Database.upgrade), or on the configured database (command line)."""

from alembic import context
from sqlalchemy import Connection

from app.db.models import Base


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from app.db.session import Database
    from app.settings import get_settings

    database = Database(get_settings().database_url)
    with database.write_connection() as opened:
        run(opened)
    database.close()
