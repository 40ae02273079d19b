"""Segments: the paths through a rollout's tree of interactions whose tokens form one exact sequence."""

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID


class TreeNode(Protocol):
    """A link of the tree: an interaction continues its parent's whole token sequence; a root has none."""

    @property
    def id(self) -> UUID: ...

    @property
    def parent_id(self) -> UUID | None: ...


def segments(interactions: Sequence[TreeNode]) -> list[list[int]]:
    """Every path from a root to a leaf, as indices into `interactions`, ordered by the leaf's index.

    interactions: one rollout's, in order of their start, parents before children. An interaction lies on one path per
    leaf below it; it is trained in the first path that holds it and is context in the others.

    Raises:
        ValueError: an id occurs twice, or a parent does not precede its child.
    """
    index: dict[UUID, int] = {}
    paths: list[list[int]] = []
    has_children = [False] * len(interactions)
    for i, interaction in enumerate(interactions):
        if interaction.id in index:
            raise ValueError(f"interaction {interaction.id} occurs twice")
        index[interaction.id] = i
        parent = interaction.parent_id
        if parent is None:
            paths.append([i])
            continue
        if parent not in index or index[parent] == i:
            raise ValueError(f"interaction {interaction.id}: its parent {parent} does not precede it in the rollout")
        has_children[index[parent]] = True
        paths.append([*paths[index[parent]], i])
    return [path for path, inner in zip(paths, has_children, strict=True) if not inner]
