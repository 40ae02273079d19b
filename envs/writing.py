"""Writing a line in a style of one's choice from a pool; which style is wanted changes, and in the end the pool too.

The reward is quality times style, both 0 or 1 and judged by rules (envs/writing_judge.py). Of four styles, in an order
drawn from the seed, the first is rewarded in phase 1 and the second in phase 2. Three are in the pool; in phase 3 the
first leaves it, the fourth comes in, and one of the two that were never rewarded is rewarded.

The prompt names the pool and shows three lines in each of its styles, in an order of the seed's. Only the pool's change
changes it, and the newcomer takes the places of the style that left.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from envs.environment import Message, Sampling
from envs.writing_judge import faults, style_of
from envs.writing_texts import LINES, TOPICS

SYSTEM = "Write one short line about the topic. Pick one style: {pool}."
POOL = 3
SHOWN = 3
"""Lines of each style in the prompt."""


@dataclass(frozen=True)
class WritingEpisode:
    messages: Sequence[Message]
    topic: str
    rewarded: str
    """The style that counts. Never leaves this process."""
    shown: Sequence[tuple[str, str]]
    """The prompt's examples, (topic, line)."""

    def judge(self, answer: str) -> float:
        decent = not faults(answer, self.topic, self.shown)
        return 1.0 if decent and style_of(answer) == self.rewarded else 0.0

    def category(self, answer: str) -> str:
        return style_of(answer) or "no style"

    def after(self, answer: str) -> None:
        return None


class Writing:
    """The environment. Everything is drawn from `seed`; no topic is in two of training, held out and prompt."""

    sampling = Sampling(max_tokens=24, temperature=1.0)
    turns = 1

    def __init__(
        self, seed: int, *, phases: int = 3, rollouts_per_phase: int = 1120, held_out_topics: int = 60
    ) -> None:
        if not 1 <= phases <= 3 or rollouts_per_phase < 1:
            raise ValueError("a run has 1 to 3 phases, and each at least one rollout")
        if not 1 <= held_out_topics <= 120:
            raise ValueError("1 to 120 topics can be held out")
        self.seed = seed
        self.phases = phases
        self.rollouts_per_phase = rollouts_per_phase
        topics = self._rng("topics").sample(TOPICS, len(TOPICS))
        shown = POOL * SHOWN
        self.shown_topics = topics[:shown]
        self.held_out_topics = topics[shown : shown + held_out_topics]
        self.training_topics = topics[shown + held_out_topics :]
        rng = self._rng("styles")
        first, second, third, fourth = rng.sample(list(LINES), 4)
        self.rewarded = [first, second, rng.choice([third, fourth])][:phases]
        pool = rng.sample([first, second, third], POOL)
        self.pools = [pool, pool, [fourth if style == first else style for style in pool]][:phases]
        self._rounds = [rng.sample(range(POOL), POOL) for _ in range(SHOWN)]
        self._lines = rng.sample(range(len(LINES[first])), SHOWN)

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"writing:{self.seed}:{purpose}")

    def shown(self, phase: int) -> list[tuple[str, str]]:
        """The prompt's examples: (topic, line)."""
        pool = self.pools[phase - 1]
        patterns = [
            LINES[pool[place]][line] for line, places in zip(self._lines, self._rounds, strict=True) for place in places
        ]
        return [(topic, line.format(topic=topic)) for topic, line in zip(self.shown_topics, patterns, strict=True)]

    def _episode(self, topic: str, phase: int) -> WritingEpisode:
        shown = self.shown(phase)
        messages: list[Message] = [{"role": "system", "content": SYSTEM.format(pool=", ".join(self.pools[phase - 1]))}]
        for about, line in shown:
            messages += [{"role": "user", "content": f"Topic: {about}"}, {"role": "assistant", "content": line}]
        messages.append({"role": "user", "content": f"Topic: {topic}"})
        return WritingEpisode(messages, topic, self.rewarded[phase - 1], shown)

    def reset(self, index: int, phase: int) -> WritingEpisode:
        """Topics come in rounds: each round is every training topic once, in an order of its own."""
        round_number, position = divmod(index, len(self.training_topics))
        order = self._rng(f"round:{round_number}").sample(self.training_topics, len(self.training_topics))
        return self._episode(order[position], phase)

    def held_out(self, phase: int) -> list[WritingEpisode]:
        return [self._episode(topic, phase) for topic in self.held_out_topics]
