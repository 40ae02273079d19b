"""Plays an environment against a running server, as any agent would: ask, turn by turn, judge, post the reward."""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from uuid import uuid4

from envs.asking import Asking, Stopped, refusal, together
from envs.backlog import Backlog
from envs.board import Board, Display
from envs.connection import Completion, Connection, RequestFailed, RolloutStatus
from envs.environment import Environment, Episode
from envs.evaluate import evaluate
from envs.journal import Journal
from envs.results import Evaluation, HeldOut, Played
from envs.watch import Watch

UNFINISHED_LIMIT = 64
"""Closed loop: rollouts neither trained nor skipped at any time, two updates' worth."""
FEEDBACK_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)
"""Waits between tries of one reward: a server that is back within a minute loses none."""


@dataclass(frozen=True)
class PlaySettings:
    """How to play.

    agents: rollouts asked for at once in the closed loop. rate: rollouts started per second, whatever the server
    does (open loop); None: closed loop. group_size: rollouts that are given one and the same prompt, one after the
    other; the server is told which by a random name. watched: held-out episodes that every version is asked while
    rollouts are played (0: none). give_up_after_s: see Asking.
    """

    policy: str = "default"
    agents: int = 16
    rate: float | None = None
    group_size: int = 1
    watched: int = 0
    give_up_after_s: float = 300.0


def check_groups(environment: Environment, group_size: int) -> None:
    """ValueError if a phase is no whole number of groups: one of them would see two phases."""
    if environment.rollouts_per_phase % group_size:
        raise ValueError(
            f"a phase of {environment.rollouts_per_phase} rollouts is no whole number of groups of {group_size}: "
            "change --rollouts-per-phase or --group-size"
        )


class Player:
    """One run. What it has measured so far is in `played`, `evaluations` and `statuses` at any time."""

    def __init__(
        self,
        environment: Environment,
        connection: Connection,
        journal: Journal,
        board: Board,
        display: Display,
        settings: PlaySettings,
    ) -> None:
        self._environment = environment
        self._connection = connection
        self._journal = journal
        self._board = board
        self._display = display
        self._settings = settings
        self._asking = Asking(connection, journal, board, display.note, give_up_after_s=settings.give_up_after_s)
        self._backlog = Backlog(
            self._asking.look,
            self._asking.failed,
            limit=UNFINISHED_LIMIT if settings.rate is None else sys.maxsize,
        )
        self._watch = Watch(self._asking, board, environment, settings.policy, settings.watched)
        self._groups: dict[int, str] = {}
        """Group number -> its random name: a number would tell the server how far the run is."""
        self.played: list[Played] = []
        self.evaluations: dict[int, Evaluation] = {}

    @property
    def statuses(self) -> dict[str, RolloutStatus]:
        return self._backlog.statuses

    @property
    def held_out(self) -> Sequence[HeldOut]:
        """What the watched versions answered."""
        return self._watch.seen

    async def play(self) -> None:
        """Play all phases. Raises Stopped with a sentence when the run cannot go on."""
        done = asyncio.Event()
        work = [self._phases(done), self._backlog.watch(done), self._tell_waiting(done)]
        if self._settings.watched:
            work.append(self._watch.watch(done))
        async with self._display.shown():
            await together(*work)
            await self._backlog.look_at_all()

    async def _tell_waiting(self, done: asyncio.Event) -> None:
        while not done.is_set():
            self._board.waiting = self._backlog.waiting() or self._asking.waiting()
            await asyncio.sleep(0.25)

    async def _phases(self, done: asyncio.Event) -> None:
        for phase in range(1, self._environment.phases + 1):
            self._journal.write("phase", phase=phase)
            self._board.start_phase(phase)
            await self._play_phase(phase)
            await self._evaluate(phase)
        done.set()

    async def _play_phase(self, phase: int) -> None:
        size = self._environment.rollouts_per_phase
        todo = deque(range((phase - 1) * size, phase * size))
        if self._settings.rate is None:
            await together(*(self._agent(todo, phase) for _ in range(self._settings.agents)))
        else:
            await self._arrivals(todo, phase, self._settings.rate)

    async def _agent(self, todo: deque[int], phase: int) -> None:
        while todo:
            await self._attempt(todo, todo.popleft(), phase)

    async def _arrivals(self, todo: deque[int], phase: int, rate: float) -> None:
        """Start `rate` rollouts per second. Failed ones come back into `todo` and arrive once more."""
        due = monotonic()
        while todo:
            async with asyncio.TaskGroup() as group:
                while todo:
                    await asyncio.sleep(max(0.0, due - monotonic()))
                    due += 1 / rate
                    group.create_task(self._attempt(todo, todo.popleft(), phase))

    async def _attempt(self, todo: deque[int], index: int, phase: int) -> None:
        """One rollout from question to reward; if a question fails, its index is to be done by another rollout."""
        await self._backlog.reserve()
        started_at = datetime.now(UTC).isoformat()
        asked = await self._ask_turns(index, phase)
        if asked is None:
            todo.appendleft(index)
            return
        turns, reward = asked
        feedback = await self._reward(turns[-1], reward)
        self._board.rewarded(reward)
        self.played.append(
            Played(
                rollout=turns[-1].rollout,
                interaction=turns[-1].interaction,
                phase=phase,
                index=index,
                version=turns[-1].version,
                turns=len(turns),
                answer="\n".join(turn.answer for turn in turns),
                reward=reward,
                feedback=feedback,
                started_at=started_at,
                latency_s=round(sum(turn.seconds for turn in turns), 4),
            )
        )

    async def _ask_turns(self, index: int, phase: int) -> tuple[list[Completion], float] | None:
        """All turns of a rollout and its reward. None: a question failed, and the place reserved is given back.

        The rollouts of a group play the episode with the group's number within the phase.
        """
        size = self._settings.group_size
        first = (phase - 1) * self._environment.rollouts_per_phase
        episode: Episode = self._environment.reset(first + (index - first) // size, phase)
        group = self._groups.setdefault(index // size, str(uuid4())) if size > 1 else None
        name = str(uuid4()) if self._environment.turns > 1 else None
        turns: list[Completion] = []
        while True:
            completion = await self._asking.ask(
                self._settings.policy,
                episode.messages,
                self._environment.sampling,
                rollout=name,
                group=group,
                phase=phase,
                index=index,
            )
            if completion is None:
                await self._abandon(turns)
                return None
            if not turns:
                self._backlog.add(completion.rollout)
            turns.append(completion)
            following = episode.after(completion.answer)
            if following is None:
                return turns, episode.judge(completion.answer)
            episode = following

    async def _abandon(self, turns: Sequence[Completion]) -> None:
        """The rollout will never have a reward: its question failed after these turns."""
        if turns:
            await self._asking.abandon(turns[0].rollout)
            self._backlog.drop(turns[0].rollout)
        else:
            self._backlog.give_back()

    async def _reward(self, completion: Completion, reward: float) -> str:
        """Post the reward until it is acknowledged: same body, same idempotency key. Returns what became of it."""
        key = f"reward-{completion.interaction}"
        named = self._environment.turns > 1
        for wait in (*FEEDBACK_WAITS_S, None):
            try:
                answer = await self._connection.reward(completion.interaction, reward, key, ends_named=named)
            except RequestFailed as failure:
                self._asking.failed(failure)
                if failure.key_refused:
                    raise Stopped(refusal(failure)) from failure
                if wait is None or not failure.transient:
                    break
                await asyncio.sleep(failure.retry_after_s or wait)
                continue
            self._asking.answered()
            self._journal.write(
                "feedback",
                interaction=completion.interaction,
                rollout=completion.rollout,
                reward=reward,
                idempotency_key=key,
                answer=answer,
            )
            return str(answer.get("status"))
        self._journal.write(
            "reward_lost", interaction=completion.interaction, rollout=completion.rollout, reward=reward
        )
        self._display.note(f"gave up posting the reward of rollout {completion.rollout}; it will not be trained")
        self._backlog.drop(completion.rollout)
        return "failed"

    async def _evaluate(self, phase: int) -> None:
        self._board.waiting = None
        self._display.note(f"phase {phase} has ended; asking held-out episodes")
        assert self._board.version is not None  # every phase has at least one answered rollout
        result = await evaluate(
            self._asking,
            self._settings.policy,
            self._board.version,
            self._environment.held_out(phase),
            max_tokens=self._environment.sampling.max_tokens,
            agents=self._settings.agents,
            phase=phase,
        )
        self.evaluations[phase] = result
        self._journal.write(
            "evaluation", phase=phase, version=result.version, asked=result.asked, correct=result.correct
        )
        self._display.note(f"phase {phase}: version {result.version} answers {result.correct:.0f} of {result.asked}")
