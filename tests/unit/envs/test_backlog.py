"""The closed loop's accounting, and what a watcher is told."""

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from envs.backlog import UNKNOWN, Backlog
from envs.board import Board, Display
from envs.connection import RequestFailed, RolloutStatus

TRAINED, TRAINING, READY = (RolloutStatus(state, None) for state in ("trained", "training", "ready"))


class Server:
    """Answers looks from `states`; a state that is missing is a 404, one that is None does not answer."""

    def __init__(self) -> None:
        self.states: dict[str, RolloutStatus | None] = {}
        self.looks: list[str] = []
        self.looked = asyncio.Event()
        self.failures: list[RequestFailed] = []

    async def look(self, rollout: str) -> RolloutStatus:
        self.looks.append(rollout)
        self.looked.set()
        if rollout not in self.states:
            raise RequestFailed("state", "404 rollout_not_found", "no", status=404)
        status = self.states[rollout]
        if status is None:
            raise RequestFailed("state", "unreachable", "refused")
        return status

    async def filled(self, rollouts: dict[str, RolloutStatus | None], limit: int) -> Backlog:
        self.states |= rollouts
        backlog = Backlog(self.look, self.failures.append, limit=limit, interval_s=0.01)
        for rollout in rollouts:
            await backlog.reserve()
            backlog.add(rollout)
        return backlog


def test_a_full_backlog_makes_room_when_a_rollout_is_trained_or_skipped() -> None:
    async def scenario() -> None:
        server = Server()
        backlog = await server.filled({"a": READY, "b": READY}, limit=2)
        done = asyncio.Event()
        watching = asyncio.create_task(backlog.watch(done))
        room = asyncio.create_task(backlog.reserve())
        await server.looked.wait()
        assert not room.done()
        server.states["b"] = RolloutStatus("skipped", "stale")
        await asyncio.wait_for(room, 5)
        assert backlog.statuses == {"a": READY, "b": RolloutStatus("skipped", "stale")}
        done.set()
        await watching

    asyncio.run(scenario())


def test_the_server_is_asked_nothing_while_there_is_room() -> None:
    async def scenario() -> None:
        server = Server()
        backlog = await server.filled({"a": READY}, limit=2)
        done = asyncio.Event()
        watching = asyncio.create_task(backlog.watch(done))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.looked.wait(), 0.2)
        done.set()
        await watching

    asyncio.run(scenario())


def test_one_rollout_in_training_is_watched_and_the_rest_looked_at_when_it_is_trained() -> None:
    async def scenario() -> None:
        server = Server()
        rollouts: dict[str, RolloutStatus | None] = {"a": READY, "b": TRAINING, "c": READY, "d": TRAINING}
        backlog = await server.filled(rollouts, limit=4)
        await backlog.look_at_all()
        server.looks.clear()
        server.looked.clear()
        done = asyncio.Event()
        watching = asyncio.create_task(backlog.watch(done))
        await server.looked.wait()
        assert server.looks[0] == "b"
        server.states |= {"b": TRAINED, "d": TRAINED}
        await asyncio.wait_for(backlog.reserve(), 5)
        await asyncio.wait_for(backlog.reserve(), 5)
        done.set()
        await watching
        assert backlog.statuses == {"a": READY, "b": TRAINED, "c": READY, "d": TRAINED}

    asyncio.run(scenario())


def test_a_rollout_that_the_server_lost_is_reported_and_holds_no_place() -> None:
    async def scenario() -> None:
        server = Server()
        backlog = await server.filled({"a": READY, "lost": READY}, limit=2)
        del server.states["lost"]
        await backlog.look_at_all()
        assert backlog.statuses["lost"] == UNKNOWN
        assert [failure.status for failure in server.failures] == [404]
        await asyncio.wait_for(backlog.reserve(), 1)

    asyncio.run(scenario())


def test_a_server_that_is_away_is_not_asked_for_all_the_rest() -> None:
    async def scenario() -> None:
        server = Server()
        backlog = await server.filled({f"r{n}": None for n in range(64)}, limit=64)
        await backlog.look_at_all()
        assert len(server.looks) == len(server.failures) == 8
        assert backlog.statuses["r0"] == RolloutStatus("open", None)

    asyncio.run(scenario())


def test_places_are_given_back_once() -> None:
    async def scenario() -> None:
        server = Server()
        backlog = await server.filled({"a": TRAINED}, limit=1)
        await backlog.look_at_all()
        backlog.seen("a", TRAINED)
        backlog.drop("a")
        await asyncio.wait_for(backlog.reserve(), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(backlog.reserve(), 0.05)

    asyncio.run(scenario())


def test_why_it_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = [100.0]
        monkeypatch.setattr("envs.backlog.monotonic", lambda: clock[0])
        backlog = await Server().filled({f"r{n}": READY for n in range(64)}, limit=64)
        assert backlog.waiting() is None
        clock[0] += 37.4
        assert backlog.waiting() == "waiting: 64 rollouts not trained yet for 37 s"
        backlog.drop("r0")
        assert backlog.waiting() is None

    asyncio.run(scenario())


def test_the_board_in_one_line() -> None:
    board = Board(phases=3, rollouts_per_phase=1280)
    assert board.request_failed("completion: timeout") is True
    board.start_phase(2)
    for reward in (0.0, 1.0, 1.0, 1.0):
        board.rewarded(reward)
    board.version = 17
    board.waiting = "waiting: 64 rollouts not trained yet for 9 s"
    assert board.request_failed("completion: timeout") is False
    assert board.line() == (
        "phase 2/3 | 4/1280 rollouts | mean of last 4: 0.75 | version 17 | 2 failed (2 completion: timeout)"
        " | waiting: 64 rollouts not trained yet for 9 s"
    )


class Screen(StringIO):
    """Lets a test wait for a text."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    async def shows(self, text: str) -> None:
        while text not in self.getvalue():
            self.written.clear()
            await asyncio.wait_for(self.written.wait(), 5)


def test_off_a_terminal_lines_are_printed_when_they_say_something_new() -> None:
    async def scenario() -> None:
        screen = Screen()
        board = Board(phases=1, rollouts_per_phase=2)
        async with Display(board, Console(file=screen), plain_every_s=0.01).shown():
            await screen.shows("0/2 rollouts")
            board.rewarded(1.0)
            await screen.shows("1/2 rollouts")
        assert screen.getvalue().count("0/2 rollouts") == 1

    asyncio.run(scenario())


def test_on_a_terminal_the_line_lives_and_notes_stay() -> None:
    async def scenario() -> None:
        screen = StringIO()
        board = Board(phases=1, rollouts_per_phase=2)
        display = Display(board, Console(file=screen, force_terminal=True, width=100))
        async with display.shown():
            display.note("a note [with brackets]")
        assert "phase 0/1 | 0/2 rollouts" in screen.getvalue()
        assert "a note [with brackets]" in screen.getvalue()

    asyncio.run(scenario())
