"""Which versions sampled the tokens of one completion: several, where the engine's weights were swapped under it."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.models import PolicyVersion

Labelled = tuple[tuple[str, int], ...]
"""((label, tokens), ...) in the order of the tokens, as an engine tells it. Our labels are adapter names."""
VersionRuns = list[tuple[int, int]]
"""[(version number, tokens), ...] in the order of the tokens."""


def version_runs(session: Session, policy_id: UUID, labelled: Labelled, tokens: int) -> VersionRuns | None:
    """The numbers of the versions with these labels; None: a label is no version's of the policy, or tokens are left
    over."""
    rows = session.execute(
        select(PolicyVersion.adapter_name, PolicyVersion.number).where(
            PolicyVersion.policy_id == policy_id, PolicyVersion.adapter_name.in_({label for label, _ in labelled})
        )
    )
    numbers = {row.adapter_name: row.number for row in rows}
    if sum(count for _, count in labelled) != tokens or any(label not in numbers for label, _ in labelled):
        return None
    runs: VersionRuns = []
    for label, count in labelled:
        number = numbers[label]
        if runs and runs[-1][0] == number:
            count += runs.pop()[1]
        runs.append((number, count))
    return runs


def sampled_versions(version: int, runs: Sequence[Sequence[int]] | None) -> set[int]:
    """Every version that sampled a token of an interaction, of its two columns."""
    return {number for number, _ in runs} if runs else {version}
