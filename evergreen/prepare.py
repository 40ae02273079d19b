"""`evergreen prepare`: schema, base model, the default policy with its version 0, the admin key. Idempotent."""

import os
import secrets
from pathlib import Path
from uuid import uuid4

from app.db.models import Policy
from app.db.repositories.keys import SCOPES, create_key
from app.db.repositories.policies import create_policy, list_policies
from app.db.repositories.versions import add_version_zero
from app.db.session import Database
from app.errors import Conflict
from app.policies.dtype import resolve_dtype
from app.policies.learning import LearningSettings, as_training
from app.settings import DEFAULT_POLICY, Settings
from learner.prepare import ensure_base_model, write_version_zero


class AnotherModel(RuntimeError):
    """The default policy was made for another base model, or trains other weights, than the settings name; the message
    says what to do."""


def prepare(settings: Settings) -> Path:
    """Bring the home to where every process can start. Returns the base model's directory.

    Raises:
        AnotherModel: see there. learner.prepare.ModelUnavailable: the base model cannot be used.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    database = Database(settings.database_url, sqlite_synchronous=settings.sqlite_synchronous)
    try:
        database.upgrade()
        with database.read() as session:
            made_for = next((p.base_model for p in list_policies(session) if p.name == DEFAULT_POLICY), None)
        base_model = ensure_base_model(settings, Path(made_for) if made_for else None)
        policy = _default_policy(database, settings, base_model)
        if policy.head is None:
            version = write_version_zero(
                policy.name,
                policy.id,
                base_model,
                LearningSettings.model_validate(policy.settings),
                settings.artifacts_dir,
                as_training(policy.training),
                resolve_dtype(settings.dtype, base_model),
            )
            with database.write() as session:
                add_version_zero(
                    session, policy.id, path=version.path, sha256=version.sha256, adapter_name=version.adapter_name
                )
        _admin_key(database, settings.admin_key_path)
    finally:
        database.close()
    return base_model


def _default_policy(database: Database, settings: Settings, base_model: Path) -> Policy:
    with database.write() as session:
        for policy in list_policies(session):
            if policy.name == DEFAULT_POLICY:
                if policy.base_model != str(base_model):
                    raise AnotherModel(
                        f"the policy {DEFAULT_POLICY!r} was made for the base model {policy.base_model}, but the "
                        f"settings (EVERGREEN_MODEL, EVERGREEN_DTYPE, EVERGREEN_HOME) now give {base_model}. Set them "
                        "as before, use another EVERGREEN_HOME, or start afresh with `evergreen reset`."
                    )
                if "training" in settings.model_fields_set and policy.training != settings.training:
                    raise AnotherModel(
                        f"the policy {DEFAULT_POLICY!r} trains {policy.training}, which is fixed, but "
                        f"EVERGREEN_TRAINING is {settings.training}. Leave it unset, use another EVERGREEN_HOME, make "
                        "another policy with POST /admin/policies, or start afresh with `evergreen reset`."
                    )
                return policy
        return create_policy(
            session,
            name=DEFAULT_POLICY,
            base_model=str(base_model),
            settings=LearningSettings.model_validate(
                {"preset": settings.preset}, context={"training": settings.training}
            ),
            training=settings.training,
        )


def _admin_key(database: Database, path: Path) -> None:
    """The key in the file opens the database: a new file, or a database that does not know the file's key yet."""
    if not path.exists():
        _write_key(path)
    try:
        _store_key(database, path)
    except Conflict:  # it was revoked, as a rotation ends; whoever starts the server gets another
        _write_key(path)
        _store_key(database, path)


def _write_key(path: Path) -> None:
    """A new secret, in the file before the database: a key that only the database knew would be lost."""
    temporary = path.with_name(f".tmp-{path.name}-{uuid4().hex}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"eg-{secrets.token_urlsafe(32)}\n")
    os.replace(temporary, path)


def _store_key(database: Database, path: Path) -> None:
    secret = path.read_text().strip()
    with database.write() as session:
        create_key(session, name="admin", scopes=SCOPES, secret=secret)
