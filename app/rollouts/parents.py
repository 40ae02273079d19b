"""Which earlier interaction a prompt continues: the longest one whose whole logged ids are its exact prefix."""

from collections.abc import Iterable
from typing import Protocol
from uuid import UUID

import numpy as np

from app.rollouts.claimed import Tokens


class Logged(Protocol):
    """A completed interaction: what its parent's tokens were followed by."""

    @property
    def id(self) -> UUID: ...
    @property
    def parent_id(self) -> UUID | None: ...
    @property
    def new_prompt_ids(self) -> Tokens: ...
    @property
    def completion_ids(self) -> Tokens: ...


def find_parent(prompt_ids: Tokens, earlier: Iterable[Logged]) -> tuple[UUID | None, int]:
    """The interaction that `prompt_ids` continues, and how many of its ids are that interaction's whole path.

    Token for token: nothing is decoded or compared as text. Of two equal paths the later interaction wins.

    Args:
        prompt_ids: (n,) the whole prompt.
        earlier: completed interactions of the same rollout, parents before children.

    Returns:
        (parent, length of its path in tokens); (None, 0) for a root.
    """
    matched: dict[UUID, int] = {}
    best: tuple[UUID | None, int] = (None, 0)
    for interaction in earlier:
        # a path can only be a prefix if its parent's path is one
        start = 0 if interaction.parent_id is None else matched.get(interaction.parent_id)
        if start is None:
            continue
        end = start
        for part in (interaction.new_prompt_ids, interaction.completion_ids):
            if not np.array_equal(prompt_ids[end : end + len(part)], part):
                break
            end += len(part)
        else:
            matched[interaction.id] = end
            if end >= best[1]:
                best = interaction.id, end
    return best
