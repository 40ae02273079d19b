"""What SAO is compared with is the same learner with one setting changed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from app.policies.learning import PAPER, LearningSettings
from learner.model import LearnerModel
from learner.optimisers import build_optimisers
from learner.step import run_update
from tests.unit.learner.batches import two_prefix_batch

ARMS: list[dict[str, Any]] = [
    {"advantage": "running_mean"},
    {"advantage": "group"},
    {"clip": "ppo"},
    {"clip": "none"},
]
WITHOUT_CRITIC = [arm for arm in ARMS if "advantage" in arm]


@pytest.mark.parametrize("preset", ["online", "paper"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_an_arm_differs_from_sao_in_one_setting(arm: dict[str, Any], preset: str) -> None:
    sao = LearningSettings.model_validate({"preset": preset}).model_dump()
    other = LearningSettings.model_validate({"preset": preset, **arm}).model_dump()
    assert {name: value for name, value in other.items() if value != sao[name]} == arm


def test_sao_is_the_default_and_no_preset_chooses_an_arm() -> None:
    assert (LearningSettings().advantage, LearningSettings().clip) == ("value", "dis")
    assert not {"advantage", "clip", "group_size"} & PAPER.keys()


def test_settings_stored_before_there_were_arms_are_sao() -> None:
    stored = LearningSettings().model_dump(mode="json")
    for name in ("advantage", "clip", "group_size"):
        del stored[name]
    assert LearningSettings.model_validate(stored) == LearningSettings()


@pytest.mark.parametrize("changes", [{"rollouts_per_update": 30}, {"group_size": 5}, {"rollouts_per_update": 4}])
def test_a_batch_that_holds_no_whole_number_of_groups_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="must be a multiple of group_size") as refused:
        LearningSettings.model_validate({"advantage": "group", **changes})
    assert refused.value.errors()[0]["loc"] == ("group_size",)
    LearningSettings.model_validate(changes)  # nobody else minds


@pytest.mark.parametrize("changes", [{"advantage": "mean"}, {"clip": "tanh"}, {"group_size": 1}])
def test_what_is_no_arm_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LearningSettings.model_validate(changes)


def weights(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


@pytest.mark.parametrize("arm", WITHOUT_CRITIC, ids=str)
def test_without_a_critic_the_policy_learns_at_once_and_the_critic_never(
    model: LearnerModel, arm: dict[str, Any]
) -> None:
    chosen = LearningSettings(lora_rank=4, value_rank=4, critic_warmup_updates=7, lr_warmup_updates=3, **arm)
    optimisers = build_optimisers(model, chosen)
    policy, value = weights(model.policy_parameters), weights(model.value_parameters)
    batch = two_prefix_batch()
    rates = []
    for done in range(5):
        result = run_update(model, optimisers, batch, chosen, done, shortfall=1.0, earlier_returns=[0.5])
        assert result.policy_changed
        rates.append(result.health["policy_lr"])
    # the critic's warm-up does not delay the learning rate's
    assert rates == pytest.approx([chosen.policy_lr * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)])
    assert any(not torch.equal(p, policy[n]) for n, p in model.policy_parameters.items())
    assert all(torch.equal(p, value[n]) for n, p in model.value_parameters.items())
    assert not optimisers.value.state
    for name in ("ev_before", "ev_after", "value_loss", "value_mean"):
        assert result.health[name] is None
    assert result.health["value_grad_norms"] == []
    assert "critic" not in result.seconds
    json.dumps(result.health, allow_nan=False)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_whole_update_of_every_arm(model: LearnerModel, arm: dict[str, Any]) -> None:
    chosen = LearningSettings(lora_rank=4, value_rank=4, **arm)
    before = weights(model.policy_parameters)
    batch = [replace(t, group=str(i % 3)) for i, t in enumerate(two_prefix_batch())]
    result = run_update(model, build_optimisers(model, chosen), batch, chosen, 10, 1.0, earlier_returns=[0.5])
    assert result.policy_changed
    assert result.health["advantage_std"] > 0  # type: ignore[operator]
    assert any(not torch.equal(p, before[n]) for n, p in model.policy_parameters.items())
    assert result.summaries.keys() == {t.rollout_id for t in batch}
    assert (result.health["ev_after"] is None) == ("advantage" in arm)
    json.dumps(result.health, allow_nan=False)


def test_what_is_far_outside_the_band_trains_under_none_alone(model: LearnerModel) -> None:
    """All ratios e^10, all advantages positive: DIS and PPO reject every token."""
    plan = model.plan(two_prefix_batch(), 4096)
    now = model.logprobs(model.read_states("policy", plan), plan.temperatures)
    taken = now.gather(1, plan.action_ids[:, None]).squeeze(1).detach()
    parts = (taken - 10.0).split([t.action_positions.numel() for t in two_prefix_batch()])
    batch = [replace(t, behaviour_logprobs=part) for t, part in zip(two_prefix_batch(), parts, strict=True)]
    for clip, masked in (("dis", 1.0), ("ppo", 1.0), ("none", 0.0)):
        chosen = LearningSettings.model_validate(
            {"lora_rank": 4, "value_rank": 4, "advantage": "running_mean", "clip": clip, "anchor_coefficient": 0.0}
        )
        before = weights(model.policy_parameters)
        result = run_update(model, build_optimisers(model, chosen), batch, chosen, 10, 1.0, earlier_returns=[-1.0])
        moved = any(not torch.equal(p, before[n]) for n, p in model.policy_parameters.items())
        assert moved == (clip == "none")
        assert result.health["masked_high"][0] == masked  # type: ignore[index]
        assert {summary.masked_share for summary in result.summaries.values()} == {masked}


def test_a_group_whose_returns_tie_moves_nothing(model: LearnerModel) -> None:
    chosen = LearningSettings(lora_rank=4, value_rank=4, advantage="group", anchor_coefficient=0.0)
    batch = [replace(t, rollout_return=1 / 3, group="g") for t in two_prefix_batch()]
    before = weights(model.policy_parameters)
    result = run_update(model, build_optimisers(model, chosen), batch, chosen, 10, 1.0)
    assert all(torch.equal(p, before[n]) for n, p in model.policy_parameters.items())
    assert result.health["advantage_std"] == 0.0
