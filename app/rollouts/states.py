"""The life of a rollout as one explicit table, and the reasons why something is not trained."""

from enum import StrEnum


class RolloutState(StrEnum):
    OPEN = "open"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    SKIPPED = "skipped"


class InteractionState(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


class SkipReason(StrEnum):
    """Why an interaction or a whole rollout is not trained."""

    NO_REWARD = "no_reward"
    STALE = "stale"
    OFF_LINEAGE = "off_lineage"
    NO_ACTION_TOKENS = "no_action_tokens"
    OFF_DISTRIBUTION_SAMPLING = "off_distribution_sampling"
    MISSING_LOGPROBS = "missing_logprobs"
    UNKNOWN_WEIGHTS = "unknown_weights"
    ABORTED = "aborted"
    AFTER_CLOSE = "after_close"
    ENVIRONMENT_ERROR = "environment_error"
    TOO_LONG = "too_long"
    OPTED_OUT = "opted_out"
    QUOTA = "quota"
    UPDATE_FAILED = "update_failed"


class FeedbackStatus(StrEnum):
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    LATE = "late"


class VersionStatus(StrEnum):
    CANDIDATE = "candidate"
    LIVE = "live"
    RETIRED = "retired"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    ROLLED_BACK = "rolled_back"


class UpdateState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class DeploymentState(StrEnum):
    LOADING = "loading"
    VERIFIED = "verified"
    FAILED = "failed"
    UNLOADED = "unloaded"


TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.OPEN: frozenset({RolloutState.READY, RolloutState.SKIPPED}),
    RolloutState.READY: frozenset({RolloutState.TRAINING, RolloutState.SKIPPED}),
    RolloutState.TRAINING: frozenset({RolloutState.TRAINED, RolloutState.READY, RolloutState.SKIPPED}),
    RolloutState.TRAINED: frozenset(),
    RolloutState.SKIPPED: frozenset({RolloutState.READY, RolloutState.SKIPPED}),
}
"""skipped -> ready only from no_reward, when a reward arrives within the staleness limit; skipped -> skipped only from
no_reward to environment_error, when that is reported after the close;
training -> ready when the update failed; training -> skipped when it failed alone three times."""
