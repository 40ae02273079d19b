"""A rollout from its first interaction to the end."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update
from uuid_utils.compat import uuid7

from app.db.models import Interaction, Rollout
from app.db.repositories.keys import create_key
from app.db.repositories.policies import create_policy
from app.db.repositories.rollouts import sampled
from app.db.session import Database
from app.db.types import clock
from app.errors import Conflict, NotFound
from app.rollouts import lifecycle
from app.rollouts.lifecycle import abort_interaction, close_rollout, complete_interaction
from app.rollouts.reach import find_rollout
from app.rollouts.segments import segments
from app.rollouts.states import SkipReason
from tests.integration.store.world import SMALL, World, completed


def close(world: World, begun_rollout: object) -> None:
    with world.database.write() as session:
        close_rollout(session, session.get_one(Rollout, begun_rollout))


def abort(world: World, interaction: object, **changes: object) -> None:
    with world.database.write() as session:
        abort_interaction(session, interaction, "the client went away", **changes)  # type: ignore[arg-type]


def test_one_call_and_its_reward_make_a_ready_rollout(world: World) -> None:
    begun = world.begin(prompt=[1, 2, 3])
    assert world.state(begun.rollout_id) == ("open", None)
    assert world.interaction(begun.interaction_id).state == "running"
    world.complete(begun.interaction_id, [4, 5])
    interaction = world.interaction(begun.interaction_id)
    assert interaction.new_prompt_ids.tolist() == [1, 2, 3]
    assert interaction.completion_ids is not None
    assert interaction.completion_ids.tolist() == [4, 5]
    assert interaction.ended_at is not None
    assert interaction.ended_at >= interaction.started_at
    answer = world.feedback(1.0, interaction=begun.interaction_id)
    assert answer["status"] == "applied"
    assert answer["rollout"] == {"state": "ready", "reason": None}
    assert world.state(begun.rollout_id) == ("ready", None)


def test_a_named_rollout_links_its_turns_by_their_tokens(world: World) -> None:
    first = world.call("chat", [1, 2], [3])
    second = world.call("chat", [1, 2, 3, 4], [5])
    fork = world.call("chat", [1, 2, 3, 9], [7])
    fresh = world.call("chat", [8], [8])
    assert {first.rollout_id, second.rollout_id, fork.rollout_id, fresh.rollout_id} == {first.rollout_id}
    assert [first.parent_id, fresh.parent_id] == [None, None]
    assert [second.parent_id, fork.parent_id] == [first.interaction_id, first.interaction_id]
    interaction = world.interaction(second.interaction_id)
    assert interaction.new_prompt_ids.tolist() == [4]
    assert interaction.prompt_tokens == 4


def test_only_completed_interactions_are_continued(world: World) -> None:
    running = world.begin("chat", [1, 2])
    aborted = world.begin("chat", [1, 2])
    abort(world, aborted.interaction_id, partial=completed([3]))
    assert world.begin("chat", [1, 2, 3, 4]).parent_id is None
    world.complete(running.interaction_id, [3])
    assert world.begin("chat", [1, 2, 3, 4]).parent_id == running.interaction_id


def test_a_call_that_names_our_id_continues_the_rollout(world: World) -> None:
    first = world.call(None, [1], [2])
    again = world.call(str(first.rollout_id), [1, 2, 3], [4])
    assert again.rollout_id == first.rollout_id
    assert again.parent_id == first.interaction_id
    # another key's rollout is out of reach: the id is taken for a name of its own
    assert world.call(str(first.rollout_id), key=world.judge).rollout_id != first.rollout_id


def test_names_belong_to_a_key_and_a_policy(world: World) -> None:
    mine = world.call("same").rollout_id
    with world.database.write() as session:
        other = create_key(session, name="other", scopes=["inference"])[0]
    assert world.call("same", key=other).rollout_id != mine


@pytest.mark.parametrize("threads", [8])
def test_concurrent_first_calls_share_one_rollout(
    world: World, open_database: Callable[[], Database], threads: int
) -> None:
    barrier = threading.Barrier(threads)
    databases = [open_database() for _ in range(threads)]

    def first_call(database: Database) -> object:
        caller = world.on(database)
        barrier.wait(timeout=30)
        return caller.begin("shared").rollout_id

    with ThreadPoolExecutor(threads) as pool:
        assert len(set(pool.map(first_call, databases))) == 1
    with world.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Rollout)) == 1


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"logprobs": None}, "missing_logprobs", "0 log-probs for 2 tokens"),
        ({"logprobs": [-0.5]}, "missing_logprobs", "1 log-probs for 2 tokens"),
        ({"logprobs": [-0.5, float("nan")]}, "missing_logprobs", "not finite"),
        ({"logprobs": [-0.5, float("-inf")]}, "missing_logprobs", "not finite"),
        ({"completion": []}, "no_action_tokens", "empty"),
    ],
)
def test_samples_that_cannot_be_trained_say_why(
    world: World, changes: dict[str, object], reason: str, detail: str
) -> None:
    begun = world.begin()
    world.complete(begun.interaction_id, **changes)  # type: ignore[arg-type]
    interaction = world.interaction(begun.interaction_id)
    assert (interaction.state, interaction.reason) == ("completed", reason)
    assert detail in (interaction.detail or "")
    world.feedback(1.0, rollout=begun.rollout_id)
    assert world.state(begun.rollout_id) == ("skipped", reason)


def test_a_request_that_opted_out_keeps_that_reason(world: World) -> None:
    begun = world.begin(untrainable=SkipReason.OPTED_OUT)
    world.complete(begun.interaction_id, logprobs=None)
    assert world.interaction(begun.interaction_id).reason == "opted_out"


def test_the_version_that_served_in_the_end_is_the_one_stored(world: World) -> None:
    begun = world.begin(version=3)
    world.complete(begun.interaction_id, version=4)
    assert world.interaction(begun.interaction_id).version == 4


def test_a_rollout_waits_for_its_last_running_interaction(world: World) -> None:
    first = world.call("chat")
    running = world.begin("chat", [9])
    answer = world.feedback(1.0, rollout="chat")
    assert answer["rollout"]["state"] == "open"
    assert "waits for its last running request" in answer["message"]
    world.complete(running.interaction_id)
    rollout = world.rollout(first.rollout_id)
    assert rollout.state == "ready"
    assert rollout.closed_at == rollout.ready_at is not None


def test_what_begins_after_the_close_is_logged_and_never_trained(world: World) -> None:
    running = world.begin("chat", [1])
    world.feedback(1.0, rollout="chat")
    while_closing = world.begin("chat", [2])
    world.complete(running.interaction_id)
    assert world.state(running.rollout_id) == ("ready", None)
    after = world.call("chat", [3])
    world.complete(while_closing.interaction_id)
    for late in (while_closing, after):
        interaction = world.interaction(late.interaction_id)
        assert (interaction.rollout_id, interaction.reason) == (running.rollout_id, "after_close")
    assert world.state(running.rollout_id) == ("ready", None)


def test_closing_without_a_reward_skips(world: World) -> None:
    begun = world.call()
    close(world, begun.rollout_id)
    assert world.state(begun.rollout_id) == ("skipped", "no_reward")
    close(world, begun.rollout_id)
    assert world.state(begun.rollout_id) == ("skipped", "no_reward")


def test_an_aborted_interaction_keeps_what_was_sampled(world: World) -> None:
    begun = world.begin()
    abort(world, begun.interaction_id, partial=completed([4]))
    interaction = world.interaction(begun.interaction_id)
    assert (interaction.state, interaction.reason, interaction.detail) == ("aborted", "aborted", "the client went away")
    assert interaction.completion_ids is not None
    assert interaction.completion_ids.tolist() == [4]
    world.feedback(1.0, rollout=begun.rollout_id)
    assert world.state(begun.rollout_id) == ("skipped", "aborted")


def test_an_interaction_ends_once(world: World) -> None:
    begun = world.call()
    with pytest.raises(Conflict, match="ended already"):
        world.complete(begun.interaction_id)
    abort(world, begun.interaction_id)
    assert world.interaction(begun.interaction_id).state == "completed"
    with pytest.raises(NotFound), world.database.write() as session:
        complete_interaction(session, uuid7(), completed())


def test_who_may_reach_a_rollout(world: World) -> None:
    mine = world.call("episode")
    with world.database.write() as session:
        create_policy(session, name="q", base_model="/m", settings=SMALL)
        stranger = create_key(session, name="s", scopes=["inference", "feedback"])[0]
        admin = create_key(session, name="a", scopes=["inference", "feedback", "admin"])[0]
        elsewhere = create_key(session, name="e", scopes=["feedback"], policy="q")[0]
        bound = create_key(session, name="b", scopes=["feedback"], policy="p")[0]
    with world.database.read() as session:
        for identifier in ("episode", str(mine.rollout_id)):
            for key in (world.key, world.judge, admin, bound):
                found = find_rollout(session, key=key, policy_id=None, identifier=identifier)
                assert found.id == mine.rollout_id
            for key in (stranger, elsewhere):
                with pytest.raises(NotFound, match="no rollout"):
                    find_rollout(session, key=key, policy_id=None, identifier=identifier)
        with pytest.raises(NotFound):
            find_rollout(session, key=bound, policy_id=uuid7(), identifier="episode")


def test_a_name_that_two_keys_gave_is_ambiguous_to_a_judge(world: World) -> None:
    first = world.call("episode")
    with world.database.write() as session:
        other = create_key(session, name="other", scopes=["inference"])[0]
    world.call("episode", key=other)
    with world.database.read() as session:
        with pytest.raises(Conflict, match="Several rollouts"):
            find_rollout(session, key=world.judge, policy_id=None, identifier="episode")
        assert find_rollout(session, key=world.key, policy_id=None, identifier="episode").id == first.rollout_id


def test_what_was_sampled_in_a_page_of_rollouts(world: World) -> None:
    chat = world.call("chat", completion=[1, 2, 3], version=0).rollout_id
    world.call("chat", completion=[1], version=2)
    world.call("chat", completion=[1], version=2)
    running = world.begin().rollout_id
    with world.database.read() as session:
        page = sampled(session, [chat, running])
    assert (page[chat].interactions, page[chat].versions, page[chat].completion_tokens) == (3, (0, 2), 5)
    assert (page[running].interactions, page[running].versions, page[running].completion_tokens) == (1, (0,), 0)


def test_a_clock_that_steps_back_does_not_put_a_child_before_its_parent(world: World) -> None:
    first = world.call("chat", [1], [2])
    with world.database.write() as session:
        later = clock(session) + timedelta(hours=1)
        session.execute(update(Interaction).values(started_at=later))
    second = world.call("chat", [1, 2, 3], [4])
    third = world.call("chat", [1, 2, 3, 4, 5], [6])
    assert (second.parent_id, third.parent_id) == (first.interaction_id, second.interaction_id)
    world.feedback(1.0, rollout="chat")
    world.rewarded()
    (chat,) = [r for r in world.batch().rollouts if r.id == first.rollout_id]
    whole = [first.interaction_id, second.interaction_id, third.interaction_id]
    assert [i.id for i in chat.interactions] == whole
    assert segments(chat.interactions) == [[0, 1, 2]]
    # never at one instant: ids come from several processes and may be out of order
    times = [world.interaction(i).started_at for i in whole]
    assert times[0] < times[1] < times[2]


def test_later_calls_add_to_a_rollouts_tags_until_it_is_closed(world: World) -> None:
    first = world.call("chat", [1], tags={"env": "tickets", "step": "1"})
    world.call("chat", [2], tags={"step": "2", "user": "u"})
    world.call("chat", [3])
    assert world.rollout(first.rollout_id).tags == {"env": "tickets", "step": "2", "user": "u"}
    world.feedback(1.0, rollout="chat")
    world.call("chat", [4], tags={"step": "4"})
    assert world.rollout(first.rollout_id).tags == {"env": "tickets", "step": "2", "user": "u"}


def test_a_rollout_that_is_never_closed_is_full_at_some_point(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_INTERACTIONS", 2)
    first = world.call("agent", [1])
    world.call("agent", [2])
    with pytest.raises(Conflict) as caught:
        world.call("agent", [3])
    assert caught.value.code == "rollout_full"
    world.feedback(1.0, rollout="agent")
    assert world.state(first.rollout_id) == ("ready", None)
    assert world.call("another", [3]).rollout_id != first.rollout_id
