"""What measurements were made under. Those of other conditions are refused, not mixed with new ones."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ABSENT = object()


class OtherConditions(ValueError):
    """What is there was made otherwise; the message says in what, and what to do."""


def check_conditions(path: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """path: what `there` was read from; the message names it.

    Raises:
        OtherConditions: they differ.
    """
    now = json.loads(json.dumps(wanted))  # as it is read back: tuples are lists
    if found := list(_differences(there, now)):
        raise OtherConditions(
            f"{path} was made under other conditions: {'; '.join(found)}. Give another --out, run with the conditions "
            "that are there, or move what is there away to measure again"
        )


def _differences(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(there.keys() | now.keys()):
        old, new = there.get(name, _ABSENT), now.get(name, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} was {_shown(old)} and is now {_shown(new)}"


def _shown(value: object) -> str:
    return "not recorded" if value is _ABSENT else json.dumps(value)
