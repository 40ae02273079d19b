"""Judging a written line by rules alone: which style it has, and whether it is a decent line about its topic.

The rules are about the surface and make no claim to taste. They are there to be hard to satisfy without writing a
sentence: a list of marker words, the topic over and over, a line of the prompt with the topic exchanged, two styles
at once or a text that was cut off all fail.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from envs.writing_texts import FUNCTION_WORDS, MARKERS

SHORTEST, LONGEST = 5, 16
"""Words of a line."""
FUNCTION = 2
"""Function words that a sentence has at least."""
MARKED = 0.5
"""The largest share of a line's words that may be marks of a style."""
COPIED = 5
"""Words in a row that are shared with a line of the prompt."""

_MARKS = frozenset().union(*MARKERS.values())
_LINE = re.compile(r"[A-Z][A-Za-z ,;:'!?.-]*[.!?]")
_TOPIC = "*"


def style_of(answer: str) -> str | None:
    """The style with the most different marks in the answer; None if there is none, or several have as many."""
    marks = {style: len(words & set(_words(answer))) for style, words in MARKERS.items()}
    most = max(marks.values())
    leaders = [style for style, count in marks.items() if count == most]
    return leaders[0] if most and len(leaders) == 1 else None


def faults(answer: str, topic: str, lines: Iterable[tuple[str, str]]) -> list[str]:
    """What is wrong with a line about `topic`, whatever its style; a decent line has no fault.

    lines: the prompt's examples as (topic, line).
    """
    words = _masked(answer, topic)
    content = Counter(word for word in words if word not in FUNCTION_WORDS)
    checks = {
        "not one line of words that ends a sentence": not _LINE.fullmatch(answer.strip()),
        f"not {SHORTEST} to {LONGEST} words": not SHORTEST <= len(words) <= LONGEST,
        "does not name the topic": _TOPIC not in words,
        "says a word twice": any(count > 1 for count in content.values()) or any(a == b for a, b in pairwise(words)),
        "no sentence": sum(word in FUNCTION_WORDS for word in words) < FUNCTION,
        "little but marks": sum(word in _MARKS for word in words) > MARKED * len(words),
        "copies a line of the prompt": any(_shares_run(words, _masked(line, about)) for about, line in lines),
    }
    return [fault for fault, found in checks.items() if found]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def _masked(text: str, topic: str) -> list[str]:
    """Its words, with the topic (singular or plural) exchanged for a sign that stands for any topic."""
    return [_TOPIC if word in (topic, f"{topic}s", f"{topic}'s") else word for word in _words(text)]


def _shares_run(words: Sequence[str], others: Sequence[str]) -> bool:
    def runs(of: Sequence[str]) -> set[tuple[str, ...]]:
        return {tuple(of[start : start + COPIED]) for start in range(len(of) - COPIED + 1)}

    return bool(runs(words) & runs(others))
