"""The two optimisers of a policy. Neither has weight decay: nothing pulls an adapter back to the base."""

from dataclasses import dataclass

from torch.optim import AdamW

from app.policies.learning import LearningSettings
from learner.model import LearnerModel
from learner.preconditioned import Preconditioned

BETAS = (0.9, 0.99)
"""A second moment that forgets within 100 steps, since gradients change their scale when the environment changes."""


@dataclass(frozen=True)
class Optimisers:
    policy: Preconditioned | AdamW
    value: AdamW


def build_optimisers(model: LearnerModel, settings: LearningSettings) -> Optimisers:
    policy: Preconditioned | AdamW
    if settings.policy_optimiser == "preconditioned":
        policy = Preconditioned(model.policy_parameters.items(), lr=settings.policy_lr)
    else:
        policy = AdamW(model.policy_parameters.items(), lr=settings.policy_lr, betas=BETAS, weight_decay=0.0)
    return Optimisers(
        policy=policy,
        value=AdamW(model.value_parameters.items(), lr=settings.value_lr, betas=BETAS, weight_decay=0.0),
    )
