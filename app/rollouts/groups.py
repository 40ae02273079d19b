"""Groups: rollouts of one prompt, which `advantage: group` compares with each other and therefore trains together.

A rollout's group is its tag `group`, a word of its client's own that is unique per key. G rollouts (`group_size`) with
one tag are a whole group, which is trained as soon as all G are ready. One that cannot be whole does not wait for ever:
once none of it is open any more and its oldest ready rollout has waited `max_wait_s`, those that are ready are trained
by themselves. What is ready beyond G waits for the same. A rollout without the tag has nobody to be compared with and
is not trained; it stays ready, for other settings, until it is too old.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, chain
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from app.db.models import Policy, Rollout
from app.db.repositories.rollouts import lock_rollouts
from app.db.repositories.updates import open_tags, ready_tags
from app.policies.learning import LearningSettings
from app.rollouts.picking import PICKING_ROUNDS, Picked, skip_too_old
from app.rollouts.states import RolloutState

TAG = "group"


def group_of(key_id: UUID, tags: dict[str, Any]) -> str | None:
    """A name for the rollout's group that no other key's has; None: it is of no group."""
    name = tags.get(TAG)
    return f"{key_id}/{name}" if isinstance(name, str) and name else None


@dataclass(frozen=True)
class ReadyGroup:
    """Rollouts that may be trained together now, at most G."""

    rollouts: tuple[UUID, ...]
    oldest_at: datetime
    """When the first of them became ready."""


@dataclass(frozen=True)
class ReadyGroups:
    groups: tuple[ReadyGroup, ...]
    """The one with the newest rollout first."""
    incomplete: int
    """Rollouts that wait for the rest of their group."""
    ungrouped: int
    """Rollouts without the tag."""

    @property
    def rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)

    @property
    def oldest_at(self) -> datetime | None:
        return min((group.oldest_at for group in self.groups), default=None)


def ready_groups(session: Session, policy: Policy, settings: LearningSettings, now: datetime) -> ReadyGroups:
    """How the policy's ready rollouts stand, those of failed updates apart."""
    still_open = {group_of(row.key_id, row.tags) for row in open_tags(session, policy.id)}
    ready: dict[str | None, list[Any]] = {}
    for row in ready_tags(session, policy.id):
        ready.setdefault(group_of(row.key_id, row.tags), []).append(row)
    ungrouped = len(ready.pop(None, ()))
    waited_since = now - timedelta(seconds=settings.max_wait_s)
    groups: list[ReadyGroup] = []
    incomplete = 0
    for name, newest_first in ready.items():
        members = newest_first[-settings.group_size :]
        oldest_at = members[-1].ready_at
        if len(members) == settings.group_size or (name not in still_open and oldest_at <= waited_since):
            groups.append(ReadyGroup(tuple(row.id for row in members), oldest_at))
            incomplete += len(newest_first) - len(members)
        else:
            incomplete += len(newest_first)
    return ReadyGroups(tuple(groups), incomplete, ungrouped)


def pick_groups(
    session: Session, policy: Policy, settings: LearningSettings, ready: Sequence[ReadyGroup]
) -> list[Picked]:
    """Lock the first groups that fit into the batch, group after group, and skip the too old among their rollouts.

    A group of which a rollout is being written to is passed. One that lost rollouts to age is trained without them:
    they will not come back.
    """
    picked: list[Picked] = []
    left = ready
    for _ in range(PICKING_ROUNDS):
        chosen, left = _fitting(left, settings.rollouts_per_update - len(picked))
        if not chosen:
            break
        locked = {
            rollout.id: rollout
            for rollout in lock_rollouts(session, [r for group in chosen for r in group.rollouts], skip_locked=True)
            if rollout.state == RolloutState.READY and rollout.retry_group is None
        }
        whole = [[locked[r] for r in group.rollouts] for group in chosen if locked.keys() >= set(group.rollouts)]
        if whole:
            picked += skip_too_old(session, policy, settings.max_staleness, [r for group in whole for r in group])
            session.flush()
    return picked


def _fitting(groups: Sequence[ReadyGroup], room: int) -> tuple[list[ReadyGroup], list[ReadyGroup]]:
    """(those that fit into so many places, first come first served; the others)"""
    chosen: list[ReadyGroup] = []
    left: list[ReadyGroup] = []
    for group in groups:
        fits = len(group.rollouts) <= room
        room -= len(group.rollouts) if fits else 0
        (chosen if fits else left).append(group)
    return chosen, left


def first_half(rollouts: Sequence[Rollout], *, whole_groups: bool) -> set[UUID]:
    """The rollouts of a failed update that are tried again first: half of them.

    rollouts: in the order of the update. whole_groups: cut between two groups, as near to the middle as can be; within
    a group only where there is no other.
    """
    parts: dict[object, list[UUID]] = {}
    for rollout in rollouts:
        group = group_of(rollout.key_id, rollout.tags) if whole_groups else None
        parts.setdefault(group or rollout.id, []).append(rollout.id)
    middle = (len(rollouts) + 1) // 2
    borders = list(accumulate(len(part) for part in parts.values()))[:-1]
    half = min(borders, key=lambda border: abs(border - middle), default=middle)
    return set(list(chain.from_iterable(parts.values()))[:half])
