"""An order desk that is worked through an API: one call per turn, an observation after each, and the API evolves.

Every task takes two calls: one looks the order up, and one acts on its parcel, whose number only the first call's
observation tells. Each phase but the first brings one change that nobody announces: the lookup is renamed; the acting
tools' argument changes; `refund` is retired, and `cancel`, which took no delivered parcel before, does its work too.
A call that fails costs a turn and half of the reward; its error says, as real ones do, what has taken the place of
what was asked for. An answer that is no call ends the rollout.

The prompt gives no version of the API away. Its four worked dialogues are of four different desks: each name and each
argument is accepted twice and refused once, each with each other once, and one refund is made by `refund` after
`cancel` has failed, one the other way round.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from envs.environment import Message, Sampling

SYSTEM = "Work the order desk: look each order up with {lookups}, then act on it with {acts}. Answer with one call."
LOOKUPS = ("find", "search")
ACTS = ("cancel", "refund")
ARGUMENTS = ("code", "number")
TASKS = ("Cancel", "Refund")
TURNS = 5
"""The most calls of a rollout."""

_CALL = re.compile(r"(\w+)\((\w+)=(\w+)\)")
_STATUS = {"Cancel": "packed", "Refund": "delivered"}


@dataclass(frozen=True)
class Api:
    """One version of the API. lookup: tool that finds an order's parcel. argument: what the acting tools call it."""

    lookup: str
    argument: str
    refunds: bool
    """Whether `refund` exists; if not, `cancel` takes delivered parcels too."""


@dataclass(frozen=True)
class Order:
    task: str
    number: int
    parcel: int

    @property
    def request(self) -> str:
        return f"{self.task} order {self.number}."


@dataclass(frozen=True)
class Reply:
    """What the API says to an answer."""

    text: str
    failed: bool = False
    done: bool = False
    """The task is."""


def call(api: Api, order: Order, answer: str) -> Reply | None:
    """What an API with no other order than this one says; None: the answer is no call."""
    parts = _CALL.fullmatch(answer.strip())
    if parts is None:
        return None
    tool, argument, value = parts.groups()
    tools = {api.lookup: "order", "cancel": api.argument} | ({"refund": api.argument} if api.refunds else {})
    right = "refund" if order.task == "Refund" and api.refunds else "cancel"
    if tool not in tools:
        return _refuse(tool, api.lookup if tool in LOOKUPS else "cancel" if tool == "refund" else None)
    if argument != tools[tool]:
        return _refuse(argument, tools[tool] if argument in ARGUMENTS and tool != api.lookup else None)
    if value != str(order.number if tool == api.lookup else order.parcel):
        return _refuse(value, None)
    if tool == api.lookup:
        return Reply(f"parcel {order.parcel}, {_STATUS[order.task]}")
    if tool != right:
        return _refuse(_STATUS[order.task], right)
    return Reply("ok", done=True)


def _refuse(what: str, instead: str | None) -> Reply:
    """An error; of what was taken once, or is by another tool, it says what is taken now."""
    return Reply(f"error: no {what}" if instead is None else f"error: no {what}, use {instead}", failed=True)


@dataclass(frozen=True)
class ToolsEpisode:
    messages: Sequence[Message]
    api: Api
    """The version of this rollout's phase. Never leaves this process."""
    order: Order
    failures: int = 0
    calls: int = 0

    def judge(self, answer: str) -> float:
        """Half of the reward is gone with every failed call; nothing until the task is done."""
        reply = call(self.api, self.order, answer)
        return 0.5**self.failures if reply and reply.done else 0.0

    def category(self, answer: str) -> str:
        reply = call(self.api, self.order, answer)
        if reply is None:
            return "no call"
        return f"done, {self.failures} calls failed" if reply.done else "not done"

    def after(self, answer: str) -> "ToolsEpisode | None":
        reply = call(self.api, self.order, answer)
        if reply is None or reply.done or self.calls + 1 == TURNS:
            return None
        messages: list[Message] = [
            *self.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": reply.text},
        ]
        return replace(self, messages=messages, failures=self.failures + reply.failed, calls=self.calls + 1)


class Tools:
    """The environment. Everything is drawn from `seed`; no order number is in two of training, held out and prompt."""

    sampling = Sampling(max_tokens=16, temperature=1.0)
    turns = TURNS

    def __init__(
        self, seed: int, *, phases: int = 4, rollouts_per_phase: int = 1120, held_out_orders: int = 100
    ) -> None:
        if not 1 <= phases <= 4 or rollouts_per_phase < 1:
            raise ValueError("the API changes three times: a run has 1 to 4 phases, and each at least one rollout")
        if not 1 <= held_out_orders <= 400:
            raise ValueError("1 to 400 orders can be held out")
        self.seed = seed
        self.phases = phases
        self.rollouts_per_phase = rollouts_per_phase
        numbers = self._rng("orders").sample(range(100, 1000), 900)
        self._held_out, self._examples, self._training = (
            numbers[:held_out_orders],
            numbers[held_out_orders : held_out_orders + 4],
            numbers[held_out_orders + 4 :],
        )
        self.apis = self._evolve(self._rng("api"))[:phases]

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"tools:{self.seed}:{purpose}")

    def _evolve(self, rng: random.Random) -> list[Api]:
        lookups, arguments = rng.sample(LOOKUPS, 2), rng.sample(ARGUMENTS, 2)
        return [
            Api(lookups[0], arguments[0], refunds=True),
            Api(lookups[1], arguments[0], refunds=True),
            Api(lookups[1], arguments[1], refunds=True),
            Api(lookups[1], arguments[1], refunds=False),
        ]

    @cached_property
    def _prompt(self) -> list[Message]:
        rng = self._rng("prompt")
        lookups, acts = (" or ".join(rng.sample(names, 2)) for names in (LOOKUPS, ACTS))
        system = SYSTEM.format(lookups=lookups, acts=acts)
        return [{"role": "system", "content": system}, *_dialogues(self._examples, rng)]

    def _order(self, number: int, rng: random.Random) -> Order:
        return Order(rng.choice(TASKS), number, rng.randrange(100, 1000))

    def _episode(self, order: Order, phase: int) -> ToolsEpisode:
        messages: list[Message] = [*self._prompt, {"role": "user", "content": order.request}]
        return ToolsEpisode(messages, self.apis[phase - 1], order)

    def reset(self, index: int, phase: int) -> ToolsEpisode:
        rng = self._rng(f"rollout:{index}")
        return self._episode(self._order(rng.choice(self._training), rng), phase)

    def held_out(self, phase: int) -> list[ToolsEpisode]:
        """The same orders, tasks and parcels in all phases; the tasks take turns."""
        rng = self._rng("held out")
        orders = [self._order(number, rng) for number in self._held_out]
        return [self._episode(replace(o, task=TASKS[n % 2]), phase) for n, o in enumerate(orders)]


def _dialogues(numbers: Sequence[int], rng: random.Random) -> list[Message]:
    """Four tasks at desks with four different APIs, in an order of the seed's.

    Over all of them each lookup and each argument is accepted twice and refused once, with each other once, and a
    refund is made once by `refund` where `cancel` had failed and once the other way round.
    """
    this, that = rng.sample(LOOKUPS, 2)
    one, two = rng.sample(ARGUMENTS, 2)
    dialogues = [
        ("Cancel", Api(that, two, refunds=True), [this, that], [("cancel", one), ("cancel", two)]),
        ("Cancel", Api(this, one, refunds=True), [that, this], [("cancel", two), ("cancel", one)]),
        ("Refund", Api(this, two, refunds=True), [this], [("cancel", two), ("refund", two)]),
        ("Refund", Api(that, one, refunds=False), [that], [("refund", one), ("cancel", one)]),
    ]
    messages: list[Message] = []
    for number, (task, api, lookups, acts) in zip(numbers, rng.sample(dialogues, 4), strict=True):
        order = Order(task, number, rng.randrange(100, 1000))
        messages.append({"role": "user", "content": order.request})
        answers = [f"{lookup}(order={number})" for lookup in lookups]
        answers += [f"{tool}({argument}={order.parcel})" for tool, argument in acts]
        for answer in answers:
            reply = call(api, order, answer)
            assert reply is not None
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": reply.text})
        messages.pop()  # the next task comes instead of an "ok"
    return messages
