"""evergreen.client when answers get lost, and when the server refuses: what is sent again, and what it counts for."""

import asyncio
from uuid import uuid4

import httpx2
import openai
import pytest

from evergreen.client import rollout
from tests.integration.service.test_client import CHAT, async_client, seen
from tests.integration.service.world import World


def test_the_same_idempotency_key_counts_once(world: World):
    key = str(uuid4())
    with world.openai() as client, rollout(client) as episode:
        episode.client.chat.completions.create(**CHAT)
        answers = [episode.reward(0.5, final=False, idempotency_key=key) for _ in range(2)]
        with pytest.raises(openai.ConflictError) as raised:
            episode.reward(0.75, final=False, idempotency_key=key)
    assert raised.value.code == "idempotency_key_reused"
    assert answers[0].id == answers[1].id
    assert len(seen(world, episode.rollout_id)["feedback"]) == 1


class Faulty(httpx2.HTTPTransport):
    """Loses the server's first answer to each path in `loses`, after the server has done its work."""

    def __init__(self, *loses: str) -> None:
        super().__init__()
        self.loses = list(loses)
        self.paths: list[str] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(request.url.path)
        response = super().handle_request(request)
        for end in self.loses:
            if request.url.path.endswith(end):
                response.read()
                self.loses.remove(end)
                raise httpx2.ReadError("the connection broke", request=request)
        return response


def test_a_reward_and_a_close_whose_answers_are_lost_are_sent_again(world: World):
    transport = Faulty("/feedback", "/close")
    with (
        openai.OpenAI(
            base_url=f"{world.url}/v1",
            api_key=world.secrets["all"],
            max_retries=0,
            http_client=httpx2.Client(transport=transport),
        ) as client,
        rollout(client) as episode,
    ):
        turn = episode.client.chat.completions.create(**CHAT)
        assert episode.reward(0.5, turn=turn.id).status == "applied"
    close = f"/v1/rollouts/{episode.rollout_id}/close"
    assert transport.paths == ["/v1/chat/completions", "/v1/feedback", "/v1/feedback", close, close]
    assert len(seen(world, episode.rollout_id)["feedback"]) == 1
    assert seen(world, episode.rollout_id)["return"] == 0.5


class AsyncFaulty(httpx2.AsyncHTTPTransport):
    """Loses the server's first answer to a reward."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.url.path == "/v1/feedback":
            self.rewards += 1
            if self.rewards == 1:
                await response.aread()
                raise httpx2.ReadError("the connection broke", request=request)
        return response


def test_a_lost_answer_to_an_async_reward(world: World):
    transport = AsyncFaulty()

    async def play() -> str:
        http_client = httpx2.AsyncClient(transport=transport)
        async with async_client(world, http_client=http_client) as client, rollout(client) as episode:
            await episode.client.chat.completions.create(**CHAT)
            assert (await episode.reward(1)).rollout.state == "ready"
        return episode.rollout_id

    assert len(seen(world, asyncio.run(play()))["feedback"]) == 1
    assert transport.rewards == 2


def test_a_refused_reward_is_sent_once(world: World):
    transport = Faulty()
    http_client = httpx2.Client(transport=transport)
    with (
        openai.OpenAI(base_url=f"{world.url}/v1", api_key=world.secrets["all"], http_client=http_client) as client,
        rollout(client) as episode,
    ):
        episode.client.chat.completions.create(**CHAT)
        episode.reward(0, final=False, idempotency_key=episode.rollout_id)
        with pytest.raises(openai.ConflictError):
            episode.reward(1, idempotency_key=episode.rollout_id)
        with pytest.raises(openai.BadRequestError) as raised:
            episode.reward(7)
        assert raised.value.code == "reward_out_of_range"
    assert transport.paths.count("/v1/feedback") == 3
    assert seen(world, episode.rollout_id)["return"] == 0.0
