"""What the default policy trains is chosen once, by EVERGREEN_TRAINING at the first `evergreen prepare`."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from app.db.models import PolicyVersion
from app.db.repositories.policies import get_policy
from app.db.session import Database
from app.settings import Settings
from evergreen.prepare import AnotherModel, prepare
from tests.contract.tiny_model import build_base_model


def test_a_default_policy_of_full_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build_base_model(tmp_path / "base")
    where = {"home": tmp_path / "home", "model": str(base)}
    monkeypatch.setenv("EVERGREEN_TRAINING", "full")
    monkeypatch.setenv("EVERGREEN_DTYPE", "bfloat16")
    settings = Settings(**where)
    prepare(settings)
    database = Database(settings.database_url)
    with database.read() as session:
        policy = get_policy(session, "default")
        zero = session.query(PolicyVersion).one()
    database.close()
    assert (policy.training, policy.head, policy.settings["policy_lr"]) == ("full", 0, 1e-6)
    assert json.loads((Path(zero.path) / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(zero.path).config.vocab_size == 320
    prepare(settings)

    monkeypatch.setenv("EVERGREEN_TRAINING", "lora")
    with pytest.raises(AnotherModel, match="trains full, which is fixed"):
        prepare(Settings(**where))
    monkeypatch.delenv("EVERGREEN_TRAINING")
    prepare(Settings(**where))
