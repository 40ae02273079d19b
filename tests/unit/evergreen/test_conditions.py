"""Measurements of other conditions are refused with a sentence that says in what they differ and what to do."""

from pathlib import Path

import pytest

from evergreen.conditions import OtherConditions, check_conditions

PATH = Path("runs/done.json")


def test_the_same_read_back_is_the_same() -> None:
    check_conditions(PATH, {"settings": {"dis_band": [0.2, 4.0]}}, {"settings": {"dis_band": (0.2, 4.0)}})


def test_what_differs_is_named_and_nothing_else() -> None:
    there = {"arm": "sao", "settings": {"clip": "dis", "policy_lr": 3e-4}}
    with pytest.raises(OtherConditions) as raised:
        check_conditions(PATH, there, {"arm": "sao", "settings": {"clip": "dis", "policy_lr": 3e-3}, "dtype": "auto"})
    message = str(raised.value)
    assert "settings.policy_lr was 0.0003 and is now 0.003" in message
    assert 'dtype was not recorded and is now "auto"' in message
    assert "runs/done.json" in message
    assert "another --out" in message
    assert "clip" not in message
    assert "arm" not in message
