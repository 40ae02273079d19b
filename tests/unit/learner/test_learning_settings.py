"""What a policy that trains full weights learns with where nothing is said."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.policies.learning import LearningSettings, as_training


def full(**chosen: Any) -> LearningSettings:
    return LearningSettings.model_validate(chosen, context={"training": "full"})


@pytest.mark.parametrize("preset", ["online", "paper"])
def test_full_weights_take_the_papers_learning_rates(preset: str) -> None:
    settings = full(preset=preset)
    assert (settings.policy_optimiser, settings.policy_lr, settings.value_lr) == ("adamw", 1e-6, 5e-6)
    assert settings.critic_steps == {"online": 1, "paper": 2}[preset]
    assert full(preset=preset, policy_lr=3e-6, value_lr=1e-5).policy_lr == 3e-6


def test_lora_keeps_its_own() -> None:
    for context in (None, {"training": "lora"}):
        settings = LearningSettings.model_validate({}, context=context)
        assert (settings.policy_optimiser, settings.policy_lr, settings.value_lr) == ("preconditioned", 3e-4, 1e-3)


@pytest.mark.parametrize(("name", "value"), [("policy_optimiser", "preconditioned"), ("lora_rank", 8)])
def test_what_is_for_adapters_alone_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match="is for adapters"):
        full(**{name: value})


def test_stored_settings_come_back_as_they_are() -> None:
    stored = full(preset="paper").model_dump(mode="json")
    assert LearningSettings.model_validate(stored) == full(preset="paper") == full(**stored)


def test_an_unknown_training_is_named() -> None:
    assert as_training("full") == "full"
    with pytest.raises(ValueError, match="unknown training 'dora'"):
        as_training("dora")
