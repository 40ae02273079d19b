"""Support tickets of three intents that must be routed to three queues, by a mapping that changes between phases.

The prompt never gives the mapping away. Its six worked examples show each intent twice with two different labels and
each label twice. The six one-to-one mappings fall into two families of three (turns and mirrors): within a family no
two agree on any intent, across families two agree on exactly one. The one label that an intent lacks in the examples
is a mapping too; it comes from one family and the phases' mappings from the other, so each of them explains exactly two
of the six examples, which is chance, and every switch moves every intent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from envs.environment import Message, Sampling
from envs.ticket_texts import INTENTS, draw_tickets

QUEUES = ("red", "green", "blue")
SYSTEM = "Route each ticket to one queue: red, green or blue."

Mapping = dict[str, str]
"""Intent -> queue, one to one."""

_TURNS: Sequence[Mapping] = [{i: QUEUES[(n + k) % 3] for n, i in enumerate(INTENTS)} for k in range(3)]
_MIRRORS: Sequence[Mapping] = [{i: QUEUES[(k - n) % 3] for n, i in enumerate(INTENTS)} for k in range(3)]


@dataclass(frozen=True)
class Ticket:
    text: str
    intent: str


@dataclass(frozen=True)
class TicketEpisode:
    messages: Sequence[Message]
    queue: str
    """The right answer. Never leaves this process."""

    def after(self, answer: str) -> None:
        return None

    def judge(self, answer: str) -> float:
        return 1.0 if answer.strip().lower() == self.queue else 0.0

    def category(self, answer: str) -> str:
        queue = answer.strip().lower()
        return queue if queue in QUEUES else "no queue"


class Tickets:
    """The environment. Everything is drawn from `seed`.

    training_texts, held_out_texts: how many tickets rollouts draw from, and how many are kept for measuring; each
    is spread evenly over the intents, and no text is in both.
    """

    sampling = Sampling(max_tokens=6, temperature=1.0)
    turns = 1

    def __init__(
        self,
        seed: int,
        *,
        phases: int = 3,
        rollouts_per_phase: int = 1120,
        training_texts: int = 180,
        held_out_texts: int = 200,
    ) -> None:
        if phases < 1 or rollouts_per_phase < 1:
            raise ValueError("a run needs at least one phase and one rollout per phase")
        if training_texts < 60:
            raise ValueError("a run needs at least 60 training texts")
        self.seed = seed
        self.phases = phases
        self.rollouts_per_phase = rollouts_per_phase
        self.training, self.held_out_tickets, example_tickets = self._draw(training_texts, held_out_texts)
        rng = self._rng("mappings")
        family, other_family = rng.sample((_TURNS, _MIRRORS), 2)
        self.mappings = _derangements(family, phases, rng)
        self.examples = _neutral_examples(example_tickets, rng.choice(other_family), rng)

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"tickets:{self.seed}:{purpose}")

    def _draw(self, training: int, held_out: int) -> tuple[list[Ticket], list[Ticket], list[Ticket]]:
        """Three disjoint sets of tickets: for training, held out, and two of each intent for the prompt."""
        sets: tuple[list[Ticket], list[Ticket], list[Ticket]] = ([], [], [])
        for position, intent in enumerate(INTENTS):
            shares = [_share(training, position), _share(held_out, position), 2]
            texts = iter(draw_tickets(intent, sum(shares), self._rng(intent)))
            for tickets, share in zip(sets, shares, strict=True):
                tickets += [Ticket(next(texts), intent) for _ in range(share)]
        return sets

    @cached_property
    def _prompt(self) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": SYSTEM}]
        for ticket, label in self.examples:
            messages.append({"role": "user", "content": ticket.text})
            messages.append({"role": "assistant", "content": label})
        return messages

    def _episode(self, ticket: Ticket, phase: int) -> TicketEpisode:
        messages: list[Message] = [*self._prompt, {"role": "user", "content": ticket.text}]
        return TicketEpisode(messages, self.mappings[phase - 1][ticket.intent])

    def reset(self, index: int, phase: int) -> TicketEpisode:
        """Tickets come in rounds: each round is every training text once, in an order of its own."""
        round_number, position = divmod(index, len(self.training))
        order = self._rng(f"round:{round_number}").sample(range(len(self.training)), len(self.training))
        return self._episode(self.training[order[position]], phase)

    def held_out(self, phase: int) -> list[TicketEpisode]:
        return [self._episode(ticket, phase) for ticket in self.held_out_tickets]


def _share(total: int, position: int) -> int:
    """The part of `total` that falls to the intent at `position` when it is spread evenly."""
    return (total + len(INTENTS) - 1 - position) // len(INTENTS)


def _derangements(family: Sequence[Mapping], phases: int, rng: random.Random) -> list[Mapping]:
    """One mapping per phase; neighbours differ on every intent, since any two of a family do."""
    mappings = [rng.choice(family)]
    while len(mappings) < phases:
        mappings.append(rng.choice([mapping for mapping in family if mapping != mappings[-1]]))
    return mappings


def _neutral_examples(tickets: Sequence[Ticket], absent: Mapping, rng: random.Random) -> list[tuple[Ticket, str]]:
    """Label an intent's two tickets with the queues that `absent` does not give it; no label twice in a row."""
    examples: list[tuple[Ticket, str]] = []
    for intent in INTENTS:
        labels = [queue for queue in QUEUES if queue != absent[intent]]
        examples += zip([t for t in tickets if t.intent == intent], rng.sample(labels, 2), strict=True)
    rng.shuffle(examples)
    while any(one == next_one for (_, one), (_, next_one) in pairwise(examples)):
        rng.shuffle(examples)
    return examples
