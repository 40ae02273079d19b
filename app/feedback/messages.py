"""What a caller is told about its feedback, in one sentence or two."""

from app.db.models import Feedback, Rollout
from app.db.repositories.feedback import REWARD
from app.rollouts.states import FeedbackStatus, RolloutState, SkipReason

_SKIPPED = {
    SkipReason.NO_REWARD: "it was closed without a reward",
    SkipReason.STALE: "its samples had become older than the policy's max_staleness",
    SkipReason.OFF_LINEAGE: "it was sampled by a version that the current weights do not descend from",
    SkipReason.NO_ACTION_TOKENS: "it has no sampled token",
    SkipReason.OFF_DISTRIBUTION_SAMPLING: (
        "its requests sampled below temperature 0.2, or with more than temperature, max_tokens, stop and seed"
    ),
    SkipReason.MISSING_LOGPROBS: "the engine gave no usable log-probs for it",
    SkipReason.UNKNOWN_WEIGHTS: "the engine did not say, or not in a way that fits, which version sampled it",
    SkipReason.ABORTED: "its requests were aborted",
    SkipReason.AFTER_CLOSE: "its requests came after its close",
    SkipReason.ENVIRONMENT_ERROR: "its environment failed",
    SkipReason.TOO_LONG: "it is too long to be trained",
    SkipReason.OPTED_OUT: "its requests asked not to be trained",
    SkipReason.QUOTA: "its key's training quota was used up",
    SkipReason.UPDATE_FAILED: "the learner failed on it three times",
}

_OPEN = "The rollout is open until a final reward, a close, or the end of its idle time."
_CLOSING = "The rollout is closing and waits for its last running request."
_LATER = {
    RolloutState.READY: "The rollout is ready and waits for an update.",
    RolloutState.TRAINING: "An update is training the rollout with the rewards it had at its start.",
    RolloutState.TRAINED: "The rollout has been trained.",
}


def describe(rollout: Rollout, feedback: Feedback) -> str:
    """What became of the feedback and of its rollout, and why."""
    what = "The reward" if feedback.metric == REWARD and feedback.value is not None else "The feedback"
    if feedback.status != FeedbackStatus.LATE:
        return f"{what} is stored. {explain(rollout)}"
    if rollout.state == RolloutState.TRAINING:
        return f"{what} came late and counts only if the running update fails. {explain(rollout)}"
    if rollout.reason == SkipReason.NO_REWARD:
        return f"{what} came late and changes nothing: the rollout's samples are older than max_staleness by now."
    return f"{what} came late and changes nothing. {explain(rollout)}"


def explain(rollout: Rollout) -> str:
    """Where a rollout stands, and what happens to it next or why nothing does."""
    if rollout.state == RolloutState.SKIPPED:
        return f"The rollout is not trained, because {_SKIPPED[SkipReason(str(rollout.reason))]}."
    if rollout.state == RolloutState.OPEN:
        return _CLOSING if rollout.closing else _OPEN
    return _LATER[RolloutState(rollout.state)]
