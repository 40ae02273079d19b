"""Rollouts that a limit of length cut off: terminal, or worth what the critic expects beyond the cut."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.optimisers import build_optimisers
from learner.sao.advantages import gae, policy_lambda
from learner.step import run_update
from learner.trajectory import Trajectory
from learner.values import end_values, value_targets
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.conftest import SETTINGS

CUT = (0, 2, 5)
BOOTSTRAP = SETTINGS.model_copy(update={"truncation": "bootstrap", "gamma": 0.5, "critic_warmup_updates": 1})


@pytest.fixture
def batch() -> list[Trajectory]:
    """Cut ones among them, with tokens of several versions."""
    return [
        replace(t, truncated=i in CUT, staleness=torch.arange(t.staleness.numel()) % 3)
        for i, t in enumerate(two_prefix_batch())
    ]


@pytest.fixture
def critic(fresh_model: LoraModel) -> LoraModel:
    """One that expects something else at every token."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in fresh_model.value_parameters.values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return fresh_model


def test_the_value_beyond_a_cut_is_that_of_the_state_after_the_last_token(
    critic: LoraModel, batch: list[Trajectory]
) -> None:
    """Read here from the value model's own hidden states, one whole trajectory at a time."""
    ends = end_values(critic, batch, BOOTSTRAP)
    for i, (trajectory, end) in enumerate(zip(batch, ends.tolist(), strict=True)):
        if i not in CUT:
            assert end == 0.0
            continue
        ids = trajectory.token_ids
        # every token but the first as an action: V(s_t) is read before token t, so the last state has no place ...
        whole = replace(trajectory, token_ids=torch.cat([ids, torch.tensor([7])]))
        positions = torch.arange(1, len(ids) + 1)
        ones = torch.ones(len(positions))
        every = replace(
            whole,
            action_positions=positions,
            behaviour_logprobs=-ones,
            rewards=0 * ones,
            reward_counts=torch.zeros(len(positions), dtype=torch.int64),
            temperatures=ones,
            staleness=torch.zeros(len(positions), dtype=torch.int64),
            interaction_index=torch.zeros(len(positions), dtype=torch.int64),
        )
        plan = critic.plan([every], 4096)
        with torch.no_grad():
            values = critic.values(critic.read_states("value", plan))
        # ... but before one token more
        assert end == pytest.approx(values[-1].item(), abs=1e-5)
        assert end != 0.0


def test_the_rest_counts_in_targets_and_advantages(critic: LoraModel, batch: list[Trajectory]) -> None:
    ends = end_values(critic, batch, BOOTSTRAP)
    values = torch.zeros(sum(t.action_positions.numel() for t in batch))
    with_rest = value_targets(batch, values, ends, BOOTSTRAP)
    without = value_targets(batch, values, torch.zeros(len(batch)), BOOTSTRAP)
    at = 0
    for trajectory, end in zip(batch, ends.tolist(), strict=True):
        count = trajectory.action_positions.numel()
        rest = torch.tensor([end * 0.5 ** (count - k) for k in range(count)])
        torch.testing.assert_close(with_rest[at : at + count] - without[at : at + count], rest, atol=1e-6, rtol=1e-6)
        at += count


@pytest.mark.parametrize("chosen", [SETTINGS, BOOTSTRAP], ids=["terminal", "bootstrap"])
def test_an_update_takes_it_into_account(critic: LoraModel, batch: list[Trajectory], chosen: LearningSettings) -> None:
    """The critic is read after its step, at the cut too."""
    chosen = chosen.model_copy(update={"critic_warmup_updates": 1, "gamma": 0.5})
    result = run_update(critic, build_optimisers(critic, chosen), batch, chosen, updates_done=0, shortfall=1.0)
    ends = end_values(critic, batch, chosen)
    assert bool(ends.any()) == (chosen.truncation == "bootstrap")
    versions = Counter(torch.cat([t.staleness for t in batch]).tolist())
    assert result.health["staleness"] == {str(steps): versions[steps] for steps in range(3)}
    plan = critic.plan(batch, 4096)
    with torch.no_grad():
        values = critic.values(critic.read_states("value", plan))
    parts = values.split([t.action_positions.numel() for t in batch])
    for trajectory, v, end in zip(batch, parts, ends.tolist(), strict=True):
        lam = policy_lambda(trajectory.rollout_action_tokens, chosen.alpha)
        expected = gae(trajectory.rewards, v, 0.5, lam, end).double().mean().item()
        assert result.summaries[trajectory.rollout_id].advantage_mean == pytest.approx(expected, abs=1e-5)


def test_without_cuts_nothing_is_read(fresh_model: LoraModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_model, "read_states", None)
    assert end_values(fresh_model, two_prefix_batch(), BOOTSTRAP).tolist() == [0.0] * 9
