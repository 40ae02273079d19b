"""A server of one's own has what it was told, not what its caller's shell had for another one."""

from pathlib import Path

import pytest

from evergreen import own_server


def test_of_the_callers_settings_it_inherits_model_and_dtype_alone() -> None:
    shell = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "EVERGREEN_MODEL": "tiny",
        "EVERGREEN_DTYPE": "float32",
        "EVERGREEN_PRESET": "paper",
        "EVERGREEN_TRAINING": "full",
        "EVERGREEN_DATABASE_URL": "postgresql://shared",
        "DATABASE_URL": "postgresql://shared",
        "BROKER_URL": "redis://shared",
        "EVERGREEN_ENGINE_URLS": "http://elsewhere",
    }
    kept = ("PATH", "OMP_NUM_THREADS", "EVERGREEN_MODEL", "EVERGREEN_DTYPE")
    assert own_server._inherited(shell) == {name: shell[name] for name in kept}


def test_the_server_is_started_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, str] = {}

    class Process:
        def __init__(self, _command: list[str], env: dict[str, str], **_: object) -> None:
            started.update(env)

        def send_signal(self, _signal: int) -> None: ...

        def wait(self, _seconds: float) -> int:
            return 0

    def not_ready(*_: object) -> None:
        raise own_server.NotReady("never")

    monkeypatch.setenv("EVERGREEN_PRESET", "paper")
    monkeypatch.setenv("DATABASE_URL", "postgresql://shared")
    monkeypatch.setattr(own_server.subprocess, "Popen", Process)
    monkeypatch.setattr(own_server, "wait_until_ready", not_ready)
    with (
        pytest.raises(own_server.NotReady),
        own_server.own_server(tmp_path / "home", 24700, {"EVERGREEN_TRAINING": "full"}),
    ):
        pass
    assert "EVERGREEN_PRESET" not in started
    assert "DATABASE_URL" not in started
    assert started["EVERGREEN_TRAINING"] == "full"  # stated
    assert started["EVERGREEN_PORT"] == "24700"
