"""The journal's lines are whole for every reader."""

import json
from pathlib import Path

from envs.journal import Journal


def test_an_answer_with_unicode_line_ends_stays_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("completion", answer="red\u2028green\x85blue")
    journal.close()
    (line,) = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["answer"] == "red\u2028green\x85blue"
