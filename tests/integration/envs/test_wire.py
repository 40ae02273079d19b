"""Everything a player sends, read off the wire by a recording proxy: OpenAI requests and rewards, and nothing else."""

from pathlib import Path

from envs.environment import Message
from envs.ticket_texts import INTENTS
from envs.tickets import Tickets
from tests.integration.envs.fake_server import FakeServer, serving
from tests.integration.envs.recording_proxy import RecordingProxy
from tests.integration.envs.test_play import SEED, rollouts, simulate

HEADERS = {
    *("host", "authorization", "accept", "accept-encoding", "connection", "user-agent", "content-length"),
    *("content-type", "x-stainless-raw-response", "x-stainless-async", "x-stainless-lang", "x-stainless-os"),
    *("x-stainless-package-version", "x-stainless-arch", "x-stainless-runtime", "x-stainless-runtime-version"),
    *("x-stainless-retry-count", "x-stainless-read-timeout"),
}
"""What the two HTTP clients send by themselves."""


def test_no_label_phase_or_hint_reaches_the_server(tmp_path: Path) -> None:
    server = FakeServer(lambda version, text: "red", per_update=16)
    server.learning.set()
    with serving(server.app()) as url:
        proxy = RecordingProxy(url)
        options = ("--phases", "3", "--rollouts-per-phase", "60", "--env-training-texts", "60")
        with serving(proxy.app()) as proxied:
            result = simulate(proxied, tmp_path, *options)
    assert result.exit_code == 0, result.output

    environment = Tickets(SEED, training_texts=60, held_out_texts=12)
    prompt = environment.reset(0, 1).messages[:-1]
    chats, rewards, looks, models = [], [], [], []
    for request in proxy.recorded:
        assert request.headers.keys() <= HEADERS, request.headers
        kind = (request.method, request.path)
        if kind == ("POST", "/v1/chat/completions"):
            chats.append(request.json)
        elif kind == ("POST", "/v1/feedback"):
            rewards.append(request.json)
        elif request.method == "GET" and request.path.removeprefix("/v1/rollouts/") in server.rollouts:
            looks.append(request)
        else:
            models.append(kind)
    assert models == [("GET", "/v1/models")]
    assert all(request.body == b"" for request in looks)
    assert len(rewards) == 3 * 60
    assert len(chats) == 3 * (60 + 12)

    training = [chat for chat in chats if "metadata" not in chat]
    held_out = [chat for chat in chats if "metadata" in chat]
    texts = {ticket.text for ticket in environment.training}
    for chat in training:
        *before, ticket = chat["messages"]
        assert chat.keys() == {"model", "messages", "temperature", "max_tokens"}
        assert (chat["model"], chat["temperature"], chat["max_tokens"]) == ("default", 1.0, 6)
        assert before == prompt
        assert ticket.keys() == {"role", "content"}
        assert ticket["content"] in texts
    for chat in held_out:
        assert chat.keys() == {"model", "messages", "temperature", "max_tokens", "metadata"}
        assert chat["metadata"] == {"train": "false"}
        assert chat["messages"][:-1] == prompt
    # a phase is one round over the 60 texts: whatever a phase might add to a request would show here
    phases = [training[n * 60 : (n + 1) * 60] for n in range(3)]
    requests = [sorted(repr(chat) for chat in phase) for phase in phases]
    assert requests[0] == requests[1] == requests[2]

    interactions = {row["interaction"]: float(row["reward"]) for row in rollouts(tmp_path)}
    for reward in rewards:
        assert reward == {
            "interaction_id": reward["interaction_id"],
            "reward": interactions[reward["interaction_id"]],
            "idempotency_key": f"reward-{reward['interaction_id']}",
        }
    assert {reward["reward"] for reward in rewards} == {0.0, 1.0}


def test_the_examples_carry_no_intent() -> None:
    environment = Tickets(SEED)
    prompt: list[Message] = list(environment.reset(0, 1).messages)
    assert all(message.keys() == {"role", "content"} for message in prompt)
    assert not any(intent in INTENTS for message in prompt for intent in message["content"].split(":")[:1])
