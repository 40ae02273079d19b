"""What every version answers to the same held-out episodes: how habits change while rollouts are played.

Sampled as rollouts are, and opted out of training. A version that is retired before it was asked is left out, so that
watching never holds anything up.
"""

import asyncio
from collections.abc import Sequence

from envs.asking import Asking, VersionNotLoaded
from envs.board import Board
from envs.environment import Environment, Episode
from envs.evaluate import ask_pinned
from envs.results import HeldOut

_LOOK_EVERY_S = 0.5
_AGENTS = 4
"""Few, beside those that play."""


class Watch:
    """episodes: how many of the held-out ones each version is asked. `seen` holds what was answered so far."""

    def __init__(self, asking: Asking, board: Board, environment: Environment, policy: str, episodes: int) -> None:
        self._asking = asking
        self._board = board
        self._environment = environment
        self._policy = policy
        self._episodes = episodes
        self.seen: list[HeldOut] = []

    async def watch(self, done: asyncio.Event) -> None:
        asked: int | None = None
        while not done.is_set():
            version = self._board.version
            if version is None or version == asked:
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            asked = version
            await self._ask(version)

    async def _ask(self, version: int) -> None:
        phase, rollouts = self._board.phase, self._board.answered_in_all
        episodes = spread(self._environment.held_out(phase), self._episodes)
        try:
            ended = await ask_pinned(
                self._asking,
                self._policy,
                version,
                episodes,
                self._environment.sampling,
                agents=_AGENTS,
                phase=phase,
            )
        except VersionNotLoaded:
            return
        self.seen += [
            HeldOut(version, phase, rollouts, episode.category(answer), episode.judge(answer))
            for episode, answer in ended
        ]


def spread(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """`count` of the episodes, evenly from all of them: neighbours may be of one kind."""
    count = min(count, len(episodes))
    return [episodes[position * len(episodes) // count] for position in range(count)]
