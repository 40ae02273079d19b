"""Which rollouts are trained and why the others are not: pure rules, no database."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.rollouts.states import InteractionState, RolloutState, SkipReason

TELLING = (
    SkipReason.MISSING_LOGPROBS,
    SkipReason.UNKNOWN_WEIGHTS,
    SkipReason.OFF_DISTRIBUTION_SAMPLING,
    SkipReason.TOO_LONG,
    SkipReason.QUOTA,
    SkipReason.NO_ACTION_TOKENS,
    SkipReason.ABORTED,
    SkipReason.OPTED_OUT,
    SkipReason.AFTER_CLOSE,
)
"""When no interaction is trainable: the reason that speaks for all, what the operator can mend first."""


@dataclass(frozen=True)
class Outcome:
    """How an interaction stands: its state, and why it is not trained (None: nothing speaks against it)."""

    state: InteractionState
    reason: SkipReason | None

    @property
    def trainable(self) -> bool:
        return self.state is InteractionState.COMPLETED and self.reason is None

    @property
    def holds_open(self) -> bool:
        """A rollout waits for it. Not for what began after the close."""
        return self.state is InteractionState.RUNNING and self.reason is not SkipReason.AFTER_CLOSE


def verdict(
    outcomes: Iterable[Outcome], *, rewarded: bool, environment_error: bool
) -> tuple[RolloutState, SkipReason | None]:
    """What a rollout becomes when it leaves `open`: ready, or skipped with the reason that tells most.

    An environment error outweighs everything: the reward is not the policy's doing. Without a trainable interaction the
    first of TELLING that occurs is the reason, whatever the reward. A trainable interaction lacks nothing but a reward.
    """
    if environment_error:
        return RolloutState.SKIPPED, SkipReason.ENVIRONMENT_ERROR
    known = list(outcomes)
    if any(outcome.trainable for outcome in known):
        return (RolloutState.READY, None) if rewarded else (RolloutState.SKIPPED, SkipReason.NO_REWARD)
    reasons = {outcome.reason for outcome in known}
    return RolloutState.SKIPPED, next((r for r in TELLING if r in reasons), SkipReason.NO_ACTION_TOKENS)


def too_old(versions: Sequence[int], chain: Mapping[int, int], max_staleness: int | None) -> SkipReason | None:
    """Why a rollout with a trainable interaction cannot be trained at this head any more; None: it can.

    The whole rollout is judged by its oldest trainable sample (GLM-5 drops a rollout whose oldest version is more than
    tau behind).

    Args:
        versions: those that sampled its trainable interactions, at least one.
        chain: policy steps from each version on the head's parent chain to the head.
        max_staleness: None = no limit.
    """
    if any(version not in chain for version in versions):
        return SkipReason.OFF_LINEAGE
    if max_staleness is not None and max(chain[version] for version in versions) > max_staleness:
        return SkipReason.STALE
    return None
