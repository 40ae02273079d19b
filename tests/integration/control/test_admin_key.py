"""The key in admin.key opens the database after every `evergreen prepare`."""

from pathlib import Path

from app.db.repositories.keys import find_key, revoke_key
from app.db.session import Database
from app.settings import Settings
from evergreen.prepare import prepare
from tests.contract.tiny_model import build_base_model


def test_a_revoked_admin_key_is_replaced_at_the_next_start(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", model=str(build_base_model(tmp_path / "base")), dtype="float32")
    prepare(settings)
    first = settings.admin_key_path.read_text()
    prepare(settings)
    assert settings.admin_key_path.read_text() == first
    database = Database(settings.database_url)
    with database.write() as session:
        key = find_key(session, first.strip())
        assert key is not None
        revoke_key(session, key.id)
    prepare(settings)
    second = settings.admin_key_path.read_text()
    with database.read() as session:
        assert find_key(session, first.strip()) is None
        found = find_key(session, second.strip())
    database.close()
    assert found is not None
    assert "admin" in found.scopes
    assert settings.admin_key_path.stat().st_mode & 0o777 == 0o600
