"""evergreen.client around the real OpenAI SDK, sync and async, against the real gateway."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import openai
import pytest

from app.db.models import Rollout
from evergreen.client import AsyncRollout, rollout
from evergreen.client import Rollout as ClientRollout
from tests.integration.service.fake_engine import FakeEngine, answer, held
from tests.integration.service.world import World

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def client(world: World) -> Iterator[openai.OpenAI]:
    with world.openai() as client:
        yield client


def async_client(world: World, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=world.secrets["all"], max_retries=0, **options)


def seen(world: World, name: str) -> dict[str, Any]:
    with world.http() as http:
        reply = http.get(f"/v1/rollouts/{name}")
        assert reply.status_code == 200, reply.text
        return reply.json()


def is_known(world: World, name: str) -> bool:
    with world.database.read() as session:
        return session.query(Rollout).filter_by(client_id=name).count() > 0


def test_turns_and_their_rewards_are_one_rollout(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        turns = [episode.client.chat.completions.create(**CHAT).id for _ in range(2)]
        first = episode.reward(0.25, turn=turns[0])
        last = episode.reward(1)
    assert (first.status, first.rollout.state, first.interaction_id) == ("applied", "open", turns[0])
    assert (last.status, last.rollout.state, last.interaction_id) == ("applied", "ready", None)
    assert "ready" in last.message
    view = seen(world, episode.rollout_id)
    assert (view["id"], view["client_id"], view["return"]) == (last.rollout_id, episode.rollout_id, 1.25)
    assert [row["id"] for row in view["interactions"]] == turns
    other = client.chat.completions.create(**CHAT)  # the given client is not changed
    assert world.interaction(other.id).rollout_id != world.interaction(turns[0]).rollout_id


def test_the_async_client_does_the_same(world: World):
    async def play() -> AsyncRollout:
        async with async_client(world) as client, rollout(client) as episode:
            turns = [(await episode.client.chat.completions.create(**CHAT)).id for _ in range(2)]
            assert (await episode.reward(0.25, turn=turns[0])).rollout.state == "open"
            assert (await episode.reward(1)).rollout.state == "ready"
        return episode

    view = seen(world, asyncio.run(play()).rollout_id)
    assert (view["return"], len(view["interactions"])) == (1.25, 2)


def test_every_kind_of_call_carries_the_name(world: World, client: openai.OpenAI):
    with rollout(client, f"named.{uuid4()}") as episode:
        kinds = [
            episode.client.chat.completions.create(**CHAT),
            episode.client.completions.create(model="default", prompt="hello"),
            episode.client.with_options(timeout=10).chat.completions.create(**CHAT),
            episode.client.chat.completions.create(**CHAT, extra_headers={"X-Other": "1"}, metadata={"run": "r1"}),
            *episode.client.chat.completions.create(**CHAT, stream=True),
        ]
        episode.reward(1)
    view = seen(world, episode.rollout_id)
    assert {row["id"] for row in view["interactions"]} == {reply.id for reply in kinds}
    assert view["tags"] == {"run": "r1"}


def test_without_a_reward_the_end_of_the_block_closes_it(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        episode.client.chat.completions.create(**CHAT)
    assert (seen(world, episode.rollout_id)["state"], seen(world, episode.rollout_id)["reason"]) == (
        "skipped",
        "no_reward",
    )

    async def play() -> str:
        async with async_client(world) as client, rollout(client) as episode:
            await episode.client.chat.completions.create(**CHAT)
        return episode.rollout_id

    assert seen(world, asyncio.run(play()))["reason"] == "no_reward"


def test_rewards_of_turns_alone_are_trained_after_the_block(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        turn = episode.client.chat.completions.create(**CHAT)
        episode.reward(0.5, turn=turn.id)
        assert seen(world, episode.rollout_id)["state"] == "open"
    assert (seen(world, episode.rollout_id)["state"], seen(world, episode.rollout_id)["return"]) == ("ready", 0.5)


def test_a_block_without_calls_leaves_nothing(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        pass
    assert not is_known(world, episode.rollout_id)


def break_off(episode: ClientRollout, error: BaseException) -> None:
    with episode:
        turn = episode.client.chat.completions.create(**CHAT)
        episode.reward(1, turn=turn.id)
        raise error


@pytest.mark.parametrize(
    ("error", "comment"),
    [
        (ZeroDivisionError("a secret"), "builtins.ZeroDivisionError"),
        (KeyboardInterrupt(), "builtins.KeyboardInterrupt"),
    ],
)
def test_a_block_that_raises_keeps_its_rollout_out_of_training(
    world: World, client: openai.OpenAI, error: BaseException, comment: str
):
    episode = rollout(client)
    with pytest.raises(type(error)) as raised:
        break_off(episode, error)
    assert raised.value is error
    assert not hasattr(error, "__notes__")
    view = seen(world, episode.rollout_id)
    assert (view["state"], view["reason"]) == ("skipped", "environment_error")
    assert [row["comment"] for row in view["feedback"]] == [None, comment]


def test_a_refused_call_that_nobody_catches_is_an_error_too(world: World, client: openai.OpenAI):
    episode = rollout(client)

    def ask() -> None:
        with episode:
            episode.client.chat.completions.create(**CHAT)
            episode.client.chat.completions.create(**CHAT, n=2)

    with pytest.raises(openai.BadRequestError):
        ask()
    view = seen(world, episode.rollout_id)
    assert (view["reason"], view["feedback"][0]["comment"]) == ("environment_error", "openai.BadRequestError")


def test_a_cancelled_task_counts_as_an_error(world: World):
    async def play() -> str:
        asked = asyncio.Event()
        names: list[str] = []

        async def agent() -> None:
            async with async_client(world) as client, rollout(client) as episode:
                names.append(episode.rollout_id)
                await episode.client.chat.completions.create(**CHAT)
                asked.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(agent())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return names[0]

    view = seen(world, asyncio.run(play()))
    assert (view["reason"], view["feedback"][0]["comment"]) == (
        "environment_error",
        "asyncio.exceptions.CancelledError",
    )


def test_an_error_after_the_final_reward_takes_nothing_back(world: World, client: openai.OpenAI):
    episode = rollout(client)

    def play() -> None:
        with episode:
            episode.client.chat.completions.create(**CHAT)
            episode.reward(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play()
    assert seen(world, episode.rollout_id)["state"] == "ready"


def test_what_could_not_be_reported_is_noted_on_the_blocks_exception(world: World):
    def play() -> None:
        with world.openai("inference") as client, rollout(client) as episode:
            episode.client.chat.completions.create(**CHAT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        play()
    (note,) = raised.value.__notes__
    assert "could not be reported" in note
    assert "lacks the scope 'feedback'" in note


def test_a_close_that_fails_is_told(world: World):
    elsewhere = openai.OpenAI(base_url=f"{world.url}/v2", api_key=world.secrets["all"])
    with elsewhere, pytest.raises(openai.NotFoundError) as raised, rollout(elsewhere):
        pass
    assert raised.value.code == "unknown_path"


def test_metrics_outcomes_and_comments(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        turn = episode.client.chat.completions.create(**CHAT)
        episode.reward(12.5, metric="seconds")
        assert episode.reward(outcome="solved", comment="in one go").rollout.state == "open"
        assert episode.reward(-1, turn=turn.id, final=True).rollout.state == "ready"
    rows = seen(world, episode.rollout_id)["feedback"]
    assert [(row["metric"], row["value"], row["outcome"], row["comment"], row["final"]) for row in rows] == [
        ("seconds", 12.5, None, None, False),
        ("reward", None, "solved", "in one go", False),
        ("reward", -1.0, None, None, True),
    ]


def test_a_reward_of_the_rollout_that_is_not_final(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        episode.client.chat.completions.create(**CHAT)
        assert episode.reward(0.5, final=False).rollout.state == "open"
    assert seen(world, episode.rollout_id)["state"] == "ready"  # closed by the end of the block


def test_an_environment_error_that_the_block_reports_itself(world: World, client: openai.OpenAI):
    with rollout(client) as episode:
        episode.client.chat.completions.create(**CHAT)
        ended = episode.reward(outcome="environment_error", comment="the database was down")
    assert (ended.rollout.state, ended.rollout.reason) == ("skipped", "environment_error")
    assert len(seen(world, episode.rollout_id)["feedback"]) == 1


def test_another_rollouts_turn_is_refused(world: World, client: openai.OpenAI):
    with rollout(client) as one, rollout(client) as two:
        turn = one.client.chat.completions.create(**CHAT)
        two.client.chat.completions.create(**CHAT)
        with pytest.raises(openai.BadRequestError) as raised:
            two.reward(1, turn=turn.id)
    assert raised.value.code == "target_mismatch"


@pytest.mark.parametrize("name", ["", "a/b", "ä", "x" * 129, "two words"])
def test_a_name_that_cannot_be_one(client: openai.OpenAI, name: str):
    with pytest.raises(ValueError, match="1 to 128 letters"):
        rollout(client, name)


def test_streams_in_the_block_are_turns(world: World, client: openai.OpenAI, engine: FakeEngine):
    with rollout(client) as episode:
        text = ""
        for chunk in episode.client.chat.completions.create(**CHAT, stream=True):
            text += chunk.choices[0].delta.content or ""
        episode.reward(0.5, turn=chunk.id)
        with episode.client.chat.completions.create(**CHAT, stream=True) as stream:
            assert next(iter(stream)).id  # and no more of it is read
        episode.client.chat.completions.create(**CHAT)
        episode.reward(0.25)
    view = seen(world, episode.rollout_id)
    assert (text, view["return"], view["interactions"][0]["reward"]) == ("abc", 0.75, 0.5)
    assert len(view["interactions"]) == 3


def test_a_stream_that_outlives_the_block_is_still_its_turn(world: World, client: openai.OpenAI, engine: FakeEngine):
    script = answer("a", "b")
    gate = held(script, before=1)
    engine.scripts.append(script)
    with rollout(client) as episode:
        stream = episode.client.chat.completions.create(**CHAT, stream=True)
        first = next(stream)
        episode.reward(1, turn=first.id)
    assert seen(world, episode.rollout_id)["state"] == "open"
    gate.set_result(None)
    list(stream)
    view = seen(world, episode.rollout_id)
    assert (view["state"], view["return"], view["interactions"][0]["completion_tokens"]) == ("ready", 1.0, 2)


def test_async_streams_and_rollouts_at_once(world: World):
    """12 episodes on one client: no turn and no reward ends up in another's rollout."""

    async def play(client: openai.AsyncOpenAI, number: int) -> tuple[str, list[str]]:
        turns = []
        async with rollout(client) as episode:
            for _ in range(3):
                async for chunk in await episode.client.chat.completions.create(**CHAT, stream=True):
                    last = chunk.id
                turns.append(last)
            await episode.reward(number / 100, turn=turns[1])
            await episode.reward(number / 10 - 1)
        return episode.rollout_id, turns

    async def all_at_once() -> list[tuple[str, list[str]]]:
        async with async_client(world) as client:
            return await asyncio.gather(*(play(client, number) for number in range(12)))

    for number, (name, turns) in enumerate(asyncio.run(all_at_once())):
        view = seen(world, name)
        assert [row["id"] for row in view["interactions"]] == turns
        assert view["return"] == pytest.approx(number / 100 + number / 10 - 1)


def test_threads_share_a_client(world: World, client: openai.OpenAI):
    def play(number: int) -> tuple[str, list[str]]:
        with rollout(client) as episode:
            turns = [episode.client.chat.completions.create(**CHAT).id for _ in range(2)]
            episode.reward(number / 10)
        return episode.rollout_id, turns

    with ThreadPoolExecutor(8) as pool:
        for number, (name, turns) in enumerate(pool.map(play, range(8))):
            view = seen(world, name)
            assert ([row["id"] for row in view["interactions"]], view["return"]) == (turns, number / 10)
