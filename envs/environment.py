"""What an environment is to the player: tasks in phases, and a judge that stays on this side of the wire.

An environment decides which messages open a rollout, what an answer is worth and what comes after it. It changes
between phases; the server is never told. Everything is a pure function of the environment's seed, so that a run can be
repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict


class Message(TypedDict):
    """One chat message, as OpenAI's API takes it."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Sampling:
    """How rollouts are sampled. Only fields that leave the sampled log-probs trainable (no top-p, no penalties)."""

    max_tokens: int
    temperature: float = 1.0


class Episode(Protocol):
    """A rollout that waits for an answer. Of all it holds, `messages` alone goes over the wire.

    An episode never changes: an answer leads to the next one, or ends the rollout.
    """

    @property
    def messages(self) -> Sequence[Message]: ...

    def after(self, answer: str) -> "Episode | None":
        """What the rollout asks next; None: this answer ends it, as every answer does to a single-turn episode.

        The next episode's messages are these, the answer unchanged, and what the environment says to it.
        """

    def judge(self, answer: str) -> float:
        """The reward of the rollout that this answer ends."""

    def category(self, answer: str) -> str:
        """Which habit an answer shows (a queue, a style), right or wrong: what whoever watches counts."""


class Environment(Protocol):
    """An evolving environment. Phases are numbered from 1; each lasts a fixed number of rollouts."""

    @property
    def phases(self) -> int: ...

    @property
    def rollouts_per_phase(self) -> int: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def turns(self) -> int:
        """The most answers that a rollout takes."""

    def reset(self, index: int, phase: int) -> Episode:
        """The episode of the rollout with number `index` (from 0, over all phases) that starts in `phase`."""

    def held_out(self, phase: int) -> Sequence[Episode]:
        """Episodes that no rollout is ever given, for measuring what was learned at the end of `phase`."""
