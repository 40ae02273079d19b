"""What a caller is told about its feedback, in one sentence or two."""

from app.db.models import Feedback, Rollout
from app.db.repositories.feedback import REWARD
from app.rollouts.states import FeedbackStatus, RolloutState, SkipReason

_SKIPPED = {
    SkipReason.NO_REWARD: "it was closed without a reward",
    SkipReason.STALE: "its samples had become older than the policy's max_staleness",
    SkipReason.OFF_LINEAGE: "it was sampled by a version that the current weights do not descend from",
    SkipReason.NO_ACTION_TOKENS: "it has no sampled token",
    SkipReason.OFF_DISTRIBUTION_SAMPLING: "its requests sampled with more than temperature, max_tokens, stop and seed",
    SkipReason.MISSING_LOGPROBS: "the engine gave no usable log-probs for it",
    SkipReason.ABORTED: "its requests were aborted",
    SkipReason.AFTER_CLOSE: "its requests came after its close",
    SkipReason.ENVIRONMENT_ERROR: "its environment failed",
    SkipReason.TOO_LONG: "it is too long to be trained",
    SkipReason.OPTED_OUT: "its requests asked not to be trained",
    SkipReason.QUOTA: "its key's training quota was used up",
    SkipReason.UPDATE_FAILED: "the learner failed on it three times",
}


def describe(rollout: Rollout, feedback: Feedback) -> str:
    """What became of the feedback and of its rollout, and why."""
    what = "The reward" if feedback.metric == REWARD and feedback.value is not None else "The feedback"
    if feedback.status == FeedbackStatus.LATE:
        return f"{what} is stored but came late: {_why_late(rollout)}"
    return f"{what} is stored. {_what_next(rollout)}"


def _why_late(rollout: Rollout) -> str:
    if rollout.state == RolloutState.TRAINING:
        return "an update is training the rollout with the rewards it had; this one counts only if that update fails."
    if rollout.state == RolloutState.TRAINED:
        return "the rollout has been trained already, and this changes nothing."
    if rollout.reason == SkipReason.NO_REWARD:
        return "the rollout was closed without a reward, and its samples have become older than max_staleness since."
    return f"the rollout is not trained, because {_SKIPPED[SkipReason(str(rollout.reason))]}."


def _what_next(rollout: Rollout) -> str:
    if rollout.state == RolloutState.READY:
        return "The rollout is ready and waits for the next update."
    if rollout.state == RolloutState.SKIPPED:
        return f"The rollout is not trained, because {_SKIPPED[SkipReason(str(rollout.reason))]}."
    if rollout.closing:
        return "The rollout is closing and leaves `open` when its last running request has ended."
    return "The rollout stays open until a final reward, a close, or its idle time ends."
