"""What `evergreen status` says of a learner."""

from datetime import UTC, datetime, timedelta

import pytest

from app.db.models import Policy, Update
from evergreen.status import learner_in_words

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


def policy(seen_s_ago: float | None, idle_reason: str | None) -> Policy:
    seen = None if seen_s_ago is None else NOW - timedelta(seconds=seen_s_ago)
    return Policy(name="p", learner_seen_at=seen, idle_reason=idle_reason)


def update(lease_s: float) -> Update:
    return Update(started_at=NOW - timedelta(seconds=70), lease_until=NOW + timedelta(seconds=lease_s))


@pytest.mark.parametrize(
    ("seen", "reason", "running", "said"),
    [
        (None, None, None, "not seen yet"),
        (70, None, update(20), "training since 11:58:50"),
        (3, "waiting: 5 of 32 rollouts", None, "waiting: 5 of 32 rollouts (seen 11:59:57)"),
        (3, None, None, "between two updates (seen 11:59:57)"),
        # a stopped one does not train for ever
        (90, None, None, "not seen since 2026-11-30 11:58:30: no learn worker runs (then: it had trained)"),
        (90, "learning_off", None, "not seen since 2026-11-30 11:58:30: no learn worker runs (then: learning_off)"),
        # nor does one that died in an update
        (90, None, update(-5), "not seen since 2026-11-30 11:58:30: no learn worker runs (then: it had trained)"),
    ],
)  # fmt: skip
def test_the_learner_in_words(seen: float | None, reason: str | None, running: Update | None, said: str) -> None:
    assert learner_in_words(policy(seen, reason), running, NOW) == said
