"""The state machine: every pair of states, allowed or refused."""

import pytest
from uuid_utils.compat import uuid7

from app.db.models import Rollout
from app.rollouts.lifecycle import IllegalTransition, transition
from app.rollouts.states import RolloutState, SkipReason

OPEN, READY, TRAINING, TRAINED, SKIPPED = RolloutState

ALLOWED = {
    (OPEN, READY),
    (OPEN, SKIPPED),
    (READY, TRAINING),
    (READY, SKIPPED),
    (TRAINING, TRAINED),
    (TRAINING, READY),
    (TRAINING, SKIPPED),
    (SKIPPED, READY),
    # from no_reward to environment_error, and no other change of reason
    (SKIPPED, SKIPPED),
}


def rollout(state: RolloutState, reason: SkipReason | None = None) -> Rollout:
    return Rollout(id=uuid7(), state=state, reason=reason)


@pytest.mark.parametrize("before", RolloutState)
@pytest.mark.parametrize("after", RolloutState)
def test_every_pair_of_states(before: RolloutState, after: RolloutState) -> None:
    row = rollout(before, SkipReason.NO_REWARD if before is SKIPPED else None)
    reason = SkipReason.ENVIRONMENT_ERROR if after is SKIPPED else None
    if (before, after) in ALLOWED:
        transition(row, after, reason)
        assert (row.state, row.reason) == (after, reason)
    else:
        with pytest.raises(IllegalTransition):
            transition(row, after, reason)
        assert row.state == before


@pytest.mark.parametrize("reason", [r for r in SkipReason if r is not SkipReason.NO_REWARD])
def test_only_a_missing_reward_can_be_made_good(reason: SkipReason) -> None:
    with pytest.raises(IllegalTransition, match=f"skipped\\({reason}\\) is final"):
        transition(rollout(SKIPPED, reason), READY)


@pytest.mark.parametrize("reason", [r for r in SkipReason if r is not SkipReason.ENVIRONMENT_ERROR])
def test_no_other_reason_takes_the_place_of_a_missing_reward(reason: SkipReason) -> None:
    with pytest.raises(IllegalTransition):
        transition(rollout(SKIPPED, SkipReason.NO_REWARD), SKIPPED, reason)


def test_a_reason_belongs_to_skipped_and_to_nothing_else() -> None:
    with pytest.raises(IllegalTransition, match="reason None"):
        transition(rollout(OPEN), SKIPPED)
    with pytest.raises(IllegalTransition, match="reason stale"):
        transition(rollout(OPEN), READY, SkipReason.STALE)
