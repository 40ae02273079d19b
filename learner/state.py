"""The learner's state of one policy in memory: weights, optimisers, and the committed update that they follow."""

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import torch

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings, Training
from app.rollouts.claimed import Claim, VersionRef
from learner.artifacts import checkpoint_dir, sha256_of
from learner.base_weights import base_sha256
from learner.checkpoint import CheckpointMismatch, load_checkpoint
from learner.full_model import FullModel
from learner.lora_model import LoraModel
from learner.model import LearnerModel
from learner.optimisers import Optimisers, build_optimisers
from learner.sao.baselines import RETURNS_KEPT

MODELS: dict[Training, type[LoraModel] | type[FullModel]] = {"lora": LoraModel, "full": FullModel}


@dataclass(frozen=True)
class LearnerState:
    model: LearnerModel
    optimisers: Optimisers
    settings: LearningSettings
    policy_id: UUID
    checkpoint_update_id: UUID | None
    head: VersionRef
    recent_returns: deque[float]
    """Of the newest rollouts trained, oldest first: what a running mean is taken of. Kept whatever the settings say."""
    recent_residuals: list[float]
    """Residuals of the newest rollouts trained, oldest first: the drift detector's window."""
    base_sha256: str
    """Of the base model's weights, as they were loaded."""

    def is_that_of(self, claim: Claim) -> bool:
        """Whether memory agrees with the database; if not, it must be loaded again."""
        return (self.policy_id, self.checkpoint_update_id, self.head, self.settings) == (
            claim.policy_id,
            claim.checkpoint_update_id,
            claim.head,
            LearningSettings.model_validate(claim.settings),
        )

    def after(self, update_id: UUID, head: VersionRef) -> "LearnerState":
        """The same memory once `update_id` has been committed on it."""
        return replace(self, checkpoint_update_id=update_id, head=head)


def load_state(claim: Claim, dtype: Dtype, artifacts_dir: Path) -> LearnerState:
    """The state that the claim's update continues: head and last checkpoint, or version 0 and fresh optimisers.

    Actor, critic, optimisers, RNG and returns must be of one update, and the actor that of the head, or nothing is
    trained.

    Raises:
        CheckpointMismatch: files are missing, changed, or do not belong together.
        OSError, ValueError: they cannot be read, or do not fit the policy's settings.
    """
    settings = LearningSettings.model_validate(claim.settings)
    head = Path(claim.head.path)
    if sha256_of(head) != claim.head.sha256:
        raise CheckpointMismatch(f"{head} is missing or is not what was committed as version {claim.head.number}")
    base = base_sha256(Path(claim.base_model))
    torch.manual_seed(settings.seed)
    model = MODELS[claim.training](Path(claim.base_model), dtype, settings, head)
    optimisers = build_optimisers(model, settings)
    recent_returns: deque[float] = deque(maxlen=RETURNS_KEPT)
    recent_residuals: list[float] = []
    if claim.checkpoint_update_id is not None:
        directory = checkpoint_dir(artifacts_dir, claim.policy_name, claim.checkpoint_update_id)
        of_head = model.served_policy()
        progress = load_checkpoint(directory, model, optimisers, update_id=claim.checkpoint_update_id)
        if progress.updates_done != claim.updates_done:
            raise CheckpointMismatch(
                f"{directory} is the state after {progress.updates_done} updates, not {claim.updates_done}"
            )
        recent_returns.extend(progress.recent_returns)
        recent_residuals.extend(progress.recent_residuals)
        if not all(torch.equal(weight, of_head[name]) for name, weight in model.served_policy().items()):
            raise CheckpointMismatch(f"the policy in {directory} is not the head, version {claim.head.number}")
    return LearnerState(
        model,
        optimisers,
        settings,
        claim.policy_id,
        claim.checkpoint_update_id,
        claim.head,
        recent_returns,
        recent_residuals,
        base,
    )
