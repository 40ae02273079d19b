"""The two optimisers of a policy. Neither has weight decay: nothing pulls an adapter back to the base."""

from dataclasses import dataclass

from torch.optim import AdamW, Optimizer

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.model import LearnerModel
from learner.preconditioned import Preconditioned
from learner.token_moments import TokenMoments

BETAS = (0.9, 0.99)
"""A second moment that forgets within 100 steps, since gradients change their scale when the environment changes."""


@dataclass(frozen=True)
class Optimisers:
    policy: Optimizer
    value: Optimizer


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
    )
