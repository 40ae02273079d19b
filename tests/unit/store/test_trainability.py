import pytest

from app.rollouts.states import InteractionState, RolloutState, SkipReason
from app.rollouts.trainability import TELLING, Outcome, too_old, verdict

COMPLETED, ABORTED, RUNNING = InteractionState.COMPLETED, InteractionState.ABORTED, InteractionState.RUNNING
GOOD = Outcome(COMPLETED, None)
READY = (RolloutState.READY, None)


def bad(reason: SkipReason, state: InteractionState = COMPLETED) -> Outcome:
    return Outcome(state, reason)


def skipped(reason: SkipReason) -> tuple[RolloutState, SkipReason]:
    return RolloutState.SKIPPED, reason


R = SkipReason
CASES = [
    # outcomes, rewarded, environment error, verdict
    ([GOOD], True, False, READY),
    ([GOOD], False, False, skipped(R.NO_REWARD)),
    ([GOOD, bad(R.OPTED_OUT)], True, False, READY),
    ([GOOD, bad(R.ABORTED, ABORTED)], False, False, skipped(R.NO_REWARD)),
    ([bad(R.AFTER_CLOSE, RUNNING), GOOD], True, False, READY),
    ([GOOD], True, True, skipped(R.ENVIRONMENT_ERROR)),
    ([bad(R.OPTED_OUT)], True, True, skipped(R.ENVIRONMENT_ERROR)),
    ([bad(R.OPTED_OUT), bad(R.OPTED_OUT)], True, False, skipped(R.OPTED_OUT)),
    ([bad(R.OPTED_OUT)], False, False, skipped(R.OPTED_OUT)),
    ([bad(R.OPTED_OUT), bad(R.ABORTED, ABORTED)], True, False, skipped(R.ABORTED)),
    ([bad(R.ABORTED, ABORTED), bad(R.OFF_DISTRIBUTION_SAMPLING)], True, False, skipped(R.OFF_DISTRIBUTION_SAMPLING)),
    ([bad(R.OFF_DISTRIBUTION_SAMPLING), bad(R.MISSING_LOGPROBS)], True, False, skipped(R.MISSING_LOGPROBS)),
    ([bad(R.NO_ACTION_TOKENS)], True, False, skipped(R.NO_ACTION_TOKENS)),
    ([bad(R.QUOTA), bad(R.OPTED_OUT)], True, False, skipped(R.QUOTA)),
    ([bad(R.TOO_LONG), bad(R.QUOTA)], True, False, skipped(R.TOO_LONG)),
]


@pytest.mark.parametrize(("outcomes", "rewarded", "environment_error", "expected"), CASES)
def test_what_a_rollout_becomes(
    outcomes: list[Outcome], rewarded: bool, environment_error: bool, expected: tuple[RolloutState, SkipReason | None]
) -> None:
    assert verdict(outcomes, rewarded=rewarded, environment_error=environment_error) == expected
    # the order in which they happened tells nothing
    assert verdict(outcomes[::-1], rewarded=rewarded, environment_error=environment_error) == expected


def test_every_reason_of_an_interaction_is_told() -> None:
    of_rollouts = {R.NO_REWARD, R.STALE, R.OFF_LINEAGE, R.ENVIRONMENT_ERROR, R.UPDATE_FAILED}
    assert set(TELLING) == set(SkipReason) - of_rollouts
    for reason in TELLING:
        assert verdict([bad(reason)], rewarded=True, environment_error=False) == skipped(reason)


def test_only_completed_interactions_without_a_reason_are_trainable() -> None:
    assert GOOD.trainable
    assert not Outcome(RUNNING, None).trainable
    assert not bad(R.OPTED_OUT).trainable


def test_a_rollout_waits_for_what_runs_unless_it_began_after_the_close() -> None:
    assert Outcome(RUNNING, None).holds_open
    assert bad(R.OPTED_OUT, RUNNING).holds_open
    assert not bad(R.AFTER_CLOSE, RUNNING).holds_open
    assert not GOOD.holds_open


CHAIN = {7: 0, 6: 1, 4: 2, 3: 3}
"""Version 5 was rolled back: 6 descends from 4."""


@pytest.mark.parametrize(
    ("versions", "limit", "expected"),
    [
        ([7], 0, None),
        ([6], 0, R.STALE),
        ([4], 2, None),
        ([7, 3], 2, R.STALE),
        ([3], None, None),
        ([5], None, R.OFF_LINEAGE),
        ([7, 5], 4, R.OFF_LINEAGE),
        ([3, 5], 0, R.OFF_LINEAGE),
    ],
)
def test_too_old(versions: list[int], limit: int | None, expected: SkipReason | None) -> None:
    assert too_old(versions, CHAIN, limit) == expected
