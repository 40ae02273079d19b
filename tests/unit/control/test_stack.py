"""The command lines of the embedded server's processes."""

import httpx

from app.engine.client import ControlClient, EngineClient
from app.engine.wire import KEEP_ALIVE_S
from app.settings import Settings
from evergreen.stack import specs

VLLM_KEEPS_S = 5
"""Its default of VLLM_HTTP_TIMEOUT_KEEP_ALIVE."""


def test_the_app_keeps_idle_connections_longer_than_its_clients() -> None:
    (app,) = (spec for spec in specs(Settings(), "base") if spec.name == "app")
    flag = app.command.index("--timeout-keep-alive")
    assert app.command[flag + 1] == f"{KEEP_ALIVE_S}"
    clients_keep_s = httpx.Limits().keepalive_expiry
    assert clients_keep_s is not None
    assert 2 * clients_keep_s < KEEP_ALIVE_S


def test_clients_of_an_engine_keep_idle_connections_shorter_than_it_does() -> None:
    for client in (EngineClient(timeout_s=1), ControlClient()):
        pool = client._http._transport._pool  # type: ignore[attr-defined]
        assert pool._keepalive_expiry < VLLM_KEEPS_S
