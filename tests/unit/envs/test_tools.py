"""The order desk: its API word by word, what changes between phases, and that the prompt gives no version away."""

import re
from collections import Counter
from itertools import pairwise

import pytest

from envs.tools import ARGUMENTS, LOOKUPS, Api, Order, Tools, ToolsEpisode, call

SEEDS = range(40)
OLD = Api(lookup="find", argument="code", refunds=True)
NEW = Api(lookup="search", argument="number", refunds=False)
CANCEL, REFUND = Order("Cancel", 505, 937), Order("Refund", 505, 937)


def said(api: Api, order: Order, answer: str) -> str | None:
    reply = call(api, order, answer)
    return None if reply is None else reply.text


@pytest.mark.parametrize(
    ("api", "order", "answer", "reply"),
    [
        (OLD, CANCEL, "find(order=505)", "parcel 937, packed"),
        (OLD, REFUND, "  find(order=505)\n", "parcel 937, delivered"),
        (OLD, CANCEL, "cancel(code=937)", "ok"),
        (OLD, REFUND, "refund(code=937)", "ok"),
        (NEW, REFUND, "cancel(number=937)", "ok"),
        (OLD, REFUND, "cancel(code=937)", "error: no delivered, use refund"),
        (OLD, CANCEL, "refund(code=937)", "error: no packed, use cancel"),
        (NEW, REFUND, "refund(number=937)", "error: no refund, use cancel"),
        (NEW, REFUND, "find(order=505)", "error: no find, use search"),
        (NEW, REFUND, "cancel(code=937)", "error: no code, use number"),
        (NEW, REFUND, "delete(number=937)", "error: no delete"),
        (NEW, REFUND, "search(number=505)", "error: no number"),
        (NEW, REFUND, "cancel(order=937)", "error: no order"),
        (OLD, CANCEL, "find(order=506)", "error: no 506"),
        (OLD, CANCEL, "cancel(code=505)", "error: no 505"),
        (OLD, CANCEL, "cancel(937)", None),
        (OLD, CANCEL, "cancel(code=937) refund(code=937)", None),
        (OLD, CANCEL, "find(order=505)\ncancel(code=937)", None),
        (OLD, CANCEL, "I would cancel(code=937)", None),
        (OLD, CANCEL, "", None),
    ],
)
def test_what_the_api_says(api: Api, order: Order, answer: str, reply: str | None) -> None:
    assert said(api, order, answer) == reply


def play(episode: ToolsEpisode, *answers: str) -> float:
    """The reward after these answers, the last of which must end the rollout and no earlier one may."""
    for answer in answers[:-1]:
        following = episode.after(answer)
        assert following is not None
        assert following.messages[:-2] == episode.messages
        assert following.messages[-2] == {"role": "assistant", "content": answer}
        assert following.messages[-1]["role"] == "user"
        episode = following
    assert episode.after(answers[-1]) is None
    return episode.judge(answers[-1])


def test_a_failed_call_halves_the_reward_and_the_fifth_call_is_the_last() -> None:
    start = ToolsEpisode([{"role": "user", "content": REFUND.request}], OLD, REFUND)
    assert play(start, "find(order=505)", "refund(code=937)") == 1.0
    assert play(start, "search(order=505)", "find(order=505)", "refund(code=937)") == 0.5
    wrong = "search(order=505)", "find(order=505)", "refund(number=937)", "cancel(code=937)"
    assert play(start, *wrong, "refund(code=937)") == 0.125
    assert play(start, *wrong, "cancel(code=937)") == 0.0


def test_no_short_cut_is_rewarded() -> None:
    start = ToolsEpisode([{"role": "user", "content": REFUND.request}], OLD, REFUND)
    assert play(start, *["find(order=505)"] * 5) == 0.0  # looking up is no work
    assert play(start, "find(order=505)", "find(order=505) refund(code=937)") == 0.0  # two calls are none
    assert play(start, "refund(code=505)", *["refund(code=505)"] * 4) == 0.0  # the parcel's number must be asked for
    assert play(start, "done") == 0.0


def test_everything_is_a_function_of_the_seed() -> None:
    one, same, other = Tools(5), Tools(5), Tools(6)
    assert one.apis == same.apis
    assert one.held_out(2) == same.held_out(2)
    assert [one.reset(i, 3) for i in range(300)] == [same.reset(i, 3) for i in range(300)]
    assert one.reset(0, 1).messages != other.reset(0, 1).messages


@pytest.mark.parametrize("seed", SEEDS)
def test_each_phase_brings_one_change(seed: int) -> None:
    changes = [
        (before.lookup != after.lookup, before.argument != after.argument, before.refunds != after.refunds)
        for before, after in pairwise(Tools(seed).apis)
    ]
    assert changes == [(True, False, False), (False, True, False), (False, False, True)]
    assert Tools(seed).apis[0].refunds


def test_every_first_version_occurs_over_the_seeds() -> None:
    assert len({Tools(seed).apis[0] for seed in SEEDS}) == 4


def test_training_held_out_and_prompt_share_no_order() -> None:
    environment = Tools(3)
    training = {environment.reset(index, 1).order.number for index in range(3000)}
    held_out = {episode.order.number for episode in environment.held_out(1)}
    prompt = {int(n) for m in environment.reset(0, 1).messages[:-1] for n in re.findall(r"order (\d+)", m["content"])}
    assert (len(held_out), len(prompt)) == (100, 4)
    assert not training & held_out
    assert not (training | held_out) & prompt


def test_the_prompt_is_the_same_in_all_phases() -> None:
    environment = Tools(9)
    for index in (0, 1, 777):
        first, *others = (environment.reset(index, phase).messages for phase in (1, 2, 3, 4))
        assert all(messages == first for messages in others)
        assert first[:-1] == environment.reset(0, 1).messages[:-1]
    assert Counter(e.order.task for e in environment.held_out(1)) == {"Cancel": 50, "Refund": 50}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_prompt_favours_no_version(seed: int) -> None:
    """Every name, argument, pair of both, and way to refund is accepted as often as its rival, and refused as often."""
    messages = Tools(seed).reset(0, 1).messages[:-1]
    accepted, refused = Counter[str](), Counter[str]()
    pairs = Counter[tuple[str, str]]()
    lookup = ""
    for message, after in pairwise([*messages, {"role": "user", "content": "Cancel order 100."}]):
        if message["role"] != "assistant":
            continue
        tool, argument = re.findall(r"[a-z]+", message["content"])
        if (instead := re.fullmatch(r"error: no (\w+), use (\w+)", after["content"])) is not None:
            refused[{"delivered": "cancel"}.get(instead[1], instead[1])] += 1
            continue
        assert not after["content"].startswith("error")
        accepted.update([tool] if tool in LOOKUPS else [tool, argument])
        if tool in LOOKUPS:
            lookup = tool
        else:
            pairs[lookup, argument] += 1
    # two cancellations, and a refund each by `cancel` and by `refund`
    assert accepted == {**dict.fromkeys((*LOOKUPS, *ARGUMENTS), 2), "cancel": 3, "refund": 1}
    assert refused == dict.fromkeys((*LOOKUPS, *ARGUMENTS, "cancel", "refund"), 1)
    assert pairs == {(name, argument): 1 for name in LOOKUPS for argument in ARGUMENTS}


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 4 phases"):
        Tools(1, phases=5)
    with pytest.raises(ValueError, match="1 to 400 orders"):
        Tools(1, held_out_orders=401)
