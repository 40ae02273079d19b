"""How long a run says that it has waited for answers."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from envs import asking
from envs.asking import Asking
from envs.board import Board
from envs.connection import Completion
from envs.environment import Sampling
from envs.journal import Journal


def test_silence_counts_from_the_question_not_from_the_last_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Answered at 0 s, then 30 s of nothing to ask, then a question that is 4 s old."""
    now = 0.0
    monkeypatch.setattr(asking, "monotonic", lambda: now)
    said: list[str | None] = []

    class Slow:
        async def complete(self, *_: Any, **__: Any) -> Completion:
            nonlocal now
            said.append(player.waiting())
            now += 4.0
            said.append(player.waiting())
            return Completion(interaction="i", rollout="r", version=0, answer="red", seconds=4.0)

    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        player = Asking(Slow(), journal, Board(phases=1, rollouts_per_phase=9), print, give_up_after_s=300)  # type: ignore[arg-type]
        now = 30.0
        asyncio.run(player.ask("m", [], Sampling(max_tokens=1, temperature=1.0)))
    assert said == [None, "waiting: no answer to 1 requests for 4 s"]
    assert player.waiting() is None
