import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, select, text

from app.db.models import Base, Policy
from app.db.session import Database
from app.policies.learning import LearningSettings


def test_migrations_build_exactly_the_models(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    with database.write_connection() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        indexes = {
            (table, index["name"]): str(index.get("dialect_options", {}).get(f"{connection.dialect.name}_where"))
            for table in Base.metadata.tables
            for index in inspect(connection).get_indexes(table)
        }
    # autogenerate does not compare the condition of a partial index
    assert "running" in indexes["updates", "uq_updates_one_running_per_policy"]
    assert "running" in indexes["interactions", "ix_interactions_running"]
    assert "open" in indexes["rollouts", "ix_rollouts_open"]
    assert "skipped" in indexes["rollouts", "ix_rollouts_skipped"]
    database.close()


def test_upgrade_twice_changes_nothing(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    database.upgrade()
    with database.write_connection() as connection:
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    database.close()


def test_settings_that_nobody_knows_any_more_are_dropped(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    known = LearningSettings().model_dump(mode="json")
    known |= {"policy_lr": 0.002, "clip": "ppo"}
    old = known | {"anchor_settled_power": 2.0, "centring_threshold": 3.0}
    with database.write() as session:
        session.add(Policy(name="old", base_model="/base", settings=old))
        session.execute(text("UPDATE alembic_version SET version_num = '0004'"))
    database.upgrade()
    with database.write() as session:
        assert session.scalars(select(Policy.settings)).all() == [known]
    database.close()


def test_several_processes_upgrade_at_once(empty_url: str, tmp_path: Path) -> None:
    script = "import sys; from app.db.session import Database; d = Database(sys.argv[1]); d.upgrade(); d.close()"
    processes = [
        # from a folder of its own: nothing may be looked up in the working directory
        subprocess.Popen([sys.executable, "-c", script, empty_url], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_unusable_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="in-memory"):
        Database("sqlite://")
    with pytest.raises(ValueError, match="mysql is not supported"):
        Database("mysql://localhost/x")
