"""The two optimisers of a policy, and what its steps remember besides.

Neither has weight decay: nothing pulls an adapter back to the base.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.model import LearnerModel
from learner.preconditioned import Preconditioned
from learner.sao.centring import PushEvidence
from learner.token_moments import TokenMoments

BETAS = (0.9, 0.99)
"""A second moment that forgets within 100 steps, since gradients change their scale when the environment changes."""


class TrainingDiverged(RuntimeError):
    """A loss or gradient is not finite. That step was not taken, but steps of the same update before it were: the
    model must be loaded again from its checkpoint."""


@dataclass(frozen=True)
class Optimisers:
    policy: Optimizer
    value: Optimizer
    pushes: PushEvidence


def build_optimisers(model: LearnerModel, settings: LearningSettings) -> Optimisers:
    """Fresh optimisers; a model has one pair of them at a time.

    Raises:
        ValueError: `preconditioned` without adapters, whose matrices B are what it preconditions.
    """
    policy: Optimizer
    if settings.policy_optimiser == "preconditioned":
        if not isinstance(model, LoraModel):
            raise ValueError("the optimiser 'preconditioned' is for LoRA: full weights train with 'adamw'")
        policy = Preconditioned(
            model.policy_parameters.items(), settings.policy_lr, TokenMoments(model.peft, "policy").take
        )
    else:
        policy = AdamW(model.policy_parameters.items(), lr=settings.policy_lr, betas=BETAS, weight_decay=0.0)
    return Optimisers(
        policy=policy,
        value=AdamW(model.value_parameters.items(), lr=settings.value_lr, betas=BETAS, weight_decay=0.0),
        pushes=PushEvidence(),
    )


def clip_and_step(optimiser: Optimizer, parameters: Mapping[str, nn.Parameter], clip: float, what: str) -> float:
    """Clips and steps; returns the gradient's norm before clipping. what: "critic" or "policy".

    Raises:
        TrainingDiverged: the gradient is not finite.
    """
    norm = nn.utils.clip_grad_norm_(parameters.values(), clip).item()
    if norm != norm or norm == float("inf"):
        raise TrainingDiverged(f"the {what}'s gradient is not finite (norm {norm}); the step was not taken")
    optimiser.step()
    optimiser.zero_grad()  # the critic's gradients and the policy's are never held at once
    return norm
