"""The two optimisers of a policy: AdamW without weight decay, so that nothing pulls an adapter back to the base."""

from dataclasses import dataclass

from torch.optim import AdamW

from app.policies.learning import LearningSettings
from learner.model import LearnerModel

BETAS = (0.9, 0.99)
"""A second moment that forgets within 100 steps, since gradients change their scale when the environment changes."""


@dataclass(frozen=True)
class Optimisers:
    policy: AdamW
    value: AdamW


def build_optimisers(model: LearnerModel, settings: LearningSettings) -> Optimisers:
    return Optimisers(
        policy=AdamW(model.policy_parameters.items(), lr=settings.policy_lr, betas=BETAS, weight_decay=0.0),
        value=AdamW(model.value_parameters.items(), lr=settings.value_lr, betas=BETAS, weight_decay=0.0),
    )
