from dataclasses import dataclass
from uuid import UUID

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from uuid_utils.compat import uuid7

from app.rollouts.claimed import Tokens
from app.rollouts.parents import find_parent


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


@dataclass(frozen=True)
class Call:
    id: UUID
    parent_id: UUID | None
    new_prompt_ids: Tokens
    completion_ids: Tokens


def call(prompt: Tokens, completion: Tokens, parent: Call | None = None) -> Call:
    return Call(uuid7(), parent.id if parent else None, prompt, completion)


def test_a_root_has_no_parent() -> None:
    assert find_parent(ids(1, 2), []) == (None, 0)


def test_the_next_turn_continues_the_whole_path() -> None:
    first = call(ids(1, 2), ids(3))
    second = call(ids(4), ids(5, 6), first)
    assert find_parent(ids(1, 2, 3, 4, 5, 6, 7), [first, second]) == (second.id, 6)
    assert find_parent(ids(1, 2, 3, 9), [first, second]) == (first.id, 3)


def test_a_token_that_differs_makes_a_root() -> None:
    first = call(ids(1, 2), ids(3))
    assert find_parent(ids(1, 2, 4, 5), [first]) == (None, 0)
    assert find_parent(ids(9, 2, 3, 5), [first]) == (None, 0)


def test_half_a_completion_is_no_prefix() -> None:
    first = call(ids(1, 2), ids(3, 4))
    assert find_parent(ids(1, 2, 3), [first]) == (None, 0)
    assert find_parent(ids(1, 2), [first]) == (None, 0)


def test_the_same_text_split_differently_still_matches_token_for_token() -> None:
    long = call(ids(1), ids(2, 3, 4))
    short = call(ids(1), ids(2))
    assert find_parent(ids(1, 2, 3, 4, 5), [long, short]) == (long.id, 4)
    assert find_parent(ids(1, 2, 5), [long, short]) == (short.id, 2)


def test_of_equal_paths_the_later_wins() -> None:
    first, again = call(ids(1), ids(2)), call(ids(1), ids(2))
    assert find_parent(ids(1, 2, 3), [first, again]) == (again.id, 2)


def test_what_descends_from_an_unknown_interaction_is_passed() -> None:
    lost = call(ids(1), ids(2))
    assert find_parent(ids(1, 2, 3, 4, 5), [call(ids(3), ids(4), lost)]) == (None, 0)


tokens = st.lists(st.integers(0, 2), max_size=3)


@given(st.lists(st.tuples(tokens, tokens.filter(bool), st.integers(0, 5)), max_size=6), st.lists(st.integers(0, 2)))
def test_against_comparing_every_whole_path(tree: list[tuple[list[int], list[int], int]], prompt: list[int]) -> None:
    calls: list[Call] = []
    paths: dict[UUID, list[int]] = {}
    for new, completion, up in tree:
        parent = calls[up % len(calls)] if calls and up else None
        calls.append(call(ids(*new), ids(*completion), parent))
        paths[calls[-1].id] = (paths[parent.id] if parent else []) + new + completion
    best: tuple[UUID | None, int] = (None, 0)
    for identifier, path in paths.items():
        if prompt[: len(path)] == path and len(path) >= best[1]:
            best = identifier, len(path)
    assert find_parent(ids(*prompt), calls) == best
