"""The ticket environment: what it draws, that switches move everything, and that the prompt gives nothing away."""

import random
import re
from collections import Counter
from itertools import pairwise, permutations

import pytest

from envs.ticket_texts import INTENTS, draw_tickets
from envs.tickets import QUEUES, SYSTEM, Tickets

SEEDS = range(60)
BIJECTIONS = [dict(zip(INTENTS, queues, strict=True)) for queues in permutations(QUEUES)]


def explained(mapping: dict[str, str], environment: Tickets) -> int:
    return sum(mapping[ticket.intent] == label for ticket, label in environment.examples)


@pytest.mark.parametrize("seed", SEEDS)
def test_training_held_out_and_example_texts_are_disjoint(seed: int) -> None:
    environment = Tickets(seed)
    training = {ticket.text for ticket in environment.training}
    held_out = {ticket.text for ticket in environment.held_out_tickets}
    examples = {ticket.text for ticket, _ in environment.examples}
    assert (len(training), len(held_out), len(examples)) == (180, 200, 6)
    assert len(training | held_out | examples) == 386


def test_intents_are_spread_evenly() -> None:
    environment = Tickets(3)
    assert Counter(t.intent for t in environment.training) == dict.fromkeys(INTENTS, 60)
    assert sorted(Counter(t.intent for t in environment.held_out_tickets).values()) == [66, 67, 67]


def test_held_out_bodies_differ_from_training_bodies_not_only_in_greeting() -> None:
    environment = Tickets(11)

    def bodies(tickets: list[str]) -> set[str]:
        subject = "(Payment|Delivery|Access): "
        greeting = rf"^{subject}((Hello|Hi there|Good morning|Hi team|Dear support|Hey)\. )?"
        ending = r" (Please help\.|Thanks\.|What should I do\?|Can you check\?|It is urgent\.)$"
        return {re.sub(ending, "", re.sub(greeting, "", text)) for text in tickets}

    training = bodies([t.text for t in environment.training])
    held_out = bodies([t.text for t in environment.held_out_tickets])
    assert len(held_out) == 200
    assert not training & held_out


def test_everything_is_a_function_of_the_seed() -> None:
    one, same, other = Tickets(5), Tickets(5), Tickets(6)
    assert one.training == same.training
    assert one.held_out_tickets == same.held_out_tickets
    assert one.examples == same.examples
    assert one.mappings == same.mappings
    assert [one.reset(i, 2) for i in range(400)] == [same.reset(i, 2) for i in range(400)]
    assert one.training != other.training
    assert one.examples != other.examples


@pytest.mark.parametrize("seed", SEEDS)
def test_every_switch_moves_every_intent(seed: int) -> None:
    mappings = Tickets(seed, phases=8).mappings
    assert len(mappings) == 8
    for before, after in pairwise(mappings):
        assert all(before[intent] != after[intent] for intent in INTENTS)
    assert all(sorted(mapping.values()) == sorted(QUEUES) for mapping in mappings)


def test_every_mapping_occurs_over_the_seeds() -> None:
    firsts = {tuple(Tickets(seed).mappings[0].values()) for seed in SEEDS}
    assert len(firsts) == 6


@pytest.mark.parametrize("seed", SEEDS)
def test_examples_are_balanced_and_fit_no_mapping(seed: int) -> None:
    environment = Tickets(seed, phases=6)
    by_intent = {intent: {label for t, label in environment.examples if t.intent == intent} for intent in INTENTS}
    assert Counter(t.intent for t, _ in environment.examples) == dict.fromkeys(INTENTS, 2)
    assert Counter(label for _, label in environment.examples) == dict.fromkeys(QUEUES, 2)
    assert all(len(labels) == 2 for labels in by_intent.values())
    # each intent's two labels contradict each other: half is the most that any mapping can explain
    assert max(explained(mapping, environment) for mapping in BIJECTIONS) == 3
    # chance is 6 examples / 3 queues = 2, and that is what every mapping of the run explains
    assert [explained(mapping, environment) for mapping in environment.mappings] == [2] * 6


@pytest.mark.parametrize("seed", SEEDS)
def test_the_examples_do_not_tell_which_mapping_a_phase_has(seed: int) -> None:
    """After a switch two mappings move every intent; the examples explain both equally well."""
    environment = Tickets(seed)
    for before in environment.mappings:
        candidates = [m for m in BIJECTIONS if all(m[i] != before[i] for i in INTENTS)]
        assert [explained(m, environment) for m in candidates] == [2, 2]


def test_the_prompt_is_the_same_in_all_phases_and_ends_with_the_ticket() -> None:
    environment = Tickets(9)
    for index in (0, 1, 777):
        first, second, third = (environment.reset(index, phase).messages for phase in (1, 2, 3))
        assert first == second == third
        assert [m["role"] for m in first] == ["system", *["user", "assistant"] * 6, "user"]
        assert first[0]["content"] == SYSTEM
        assert first[:-1] == environment.reset(0, 1).messages[:-1]
    assert [m["content"] for m in environment.held_out(1)[4].messages] == [
        m["content"] for m in environment.held_out(3)[4].messages
    ]


def test_every_ticket_starts_with_the_subject_of_its_intent() -> None:
    environment = Tickets(3)
    examples = [ticket for ticket, _ in environment.examples]
    for ticket in environment.training + environment.held_out_tickets + examples:
        subject, _, body = ticket.text.partition(": ")
        assert (subject.lower(), bool(body)) == (ticket.intent, True), ticket.text


def test_no_ticket_names_a_queue_or_a_colour() -> None:
    environment = Tickets(2, training_texts=600)
    words = re.compile(r"\b(red|green|blue|queue|route|colou?r)\b", re.IGNORECASE)
    for ticket in environment.training + environment.held_out_tickets:
        assert not words.search(ticket.text), ticket.text


def test_a_round_holds_every_training_text_once() -> None:
    environment = Tickets(4)
    texts = {ticket.text for ticket in environment.training}
    rounds = [[environment.reset(180 * r + i, 1).messages[-1]["content"] for i in range(180)] for r in (0, 1)]
    assert set(rounds[0]) == set(rounds[1]) == texts
    assert rounds[0] != rounds[1]


def test_judging() -> None:
    environment = Tickets(1)
    episode = environment.reset(0, 1)
    intent = next(t.intent for t in environment.training if t.text == episode.messages[-1]["content"])
    right = environment.mappings[0][intent]
    assert episode.judge(right) == 1.0
    assert episode.judge(f"  {right.upper()}\n") == 1.0
    assert episode.judge(f"{right}.") == 0.0
    assert episode.judge(f"{right} queue") == 0.0
    assert episode.judge("") == 0.0
    assert [episode.judge(queue) for queue in QUEUES].count(1.0) == 1
    assert environment.reset(0, 2).judge(right) == 0.0


def test_asking_for_more_texts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="do not yield 2000 different access tickets"):
        draw_tickets("access", 2_000, random.Random(0))
    with pytest.raises(ValueError, match="at least 60 training texts"):
        Tickets(1, training_texts=59)
