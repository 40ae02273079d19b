"""When an update adds to the evidence of the common pushes, and what it reads there."""

import pytest
import torch
from torch import Tensor

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.optimisers import Optimisers, build_optimisers
from learner.sao.centring import PushEvidence, PushSums
from learner.step import UpdateResult, run_update
from tests.unit.learner.batches import two_prefix_batch
from tests.unit.learner.updates import settings

WARMED_UP = 10


def run(model: LoraModel, optimisers: Optimisers, chosen: LearningSettings, done: int = WARMED_UP) -> UpdateResult:
    return run_update(model, optimisers, two_prefix_batch(), chosen, done, shortfall=1.0)


@pytest.mark.parametrize("budget", [4096, 30])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_is_added_once_however_often_it_is_stepped_on(
    model: LoraModel, monkeypatch: pytest.MonkeyPatch, steps: int, budget: int
) -> None:
    added: list[PushSums] = []
    add = PushEvidence.add

    def counting(evidence: PushEvidence, sums: PushSums) -> None:
        added.append(sums)
        add(evidence, sums)

    monkeypatch.setattr(PushEvidence, "add", counting)
    chosen = settings(policy_steps=steps, tokens_per_micro_batch=budget)
    run(model, build_optimisers(model, chosen), chosen)
    assert len(added) == 1
    assert int(added[0].tokens.sum()) == sum(t.action_positions.numel() for t in two_prefix_batch())


def test_a_warm_up_adds_nothing_and_forgets_nothing(model: LoraModel) -> None:
    chosen = settings(critic_warmup_updates=2)
    optimisers = build_optimisers(model, chosen)
    result = run(model, optimisers, chosen, done=1)
    assert result.health["noise_share"] is None
    assert optimisers.pushes.pushes is None
    run(model, optimisers, chosen, done=2)
    kept = optimisers.pushes.pushes
    assert kept is not None
    run(model, optimisers, chosen, done=1)
    assert optimisers.pushes.pushes is kept


def test_without_centring_the_evidence_is_forgotten(model: LoraModel) -> None:
    """What was gathered before is of another time, and of another scale if advantages have changed theirs."""
    chosen = settings()
    optimisers = build_optimisers(model, chosen)
    run(model, optimisers, chosen)
    assert optimisers.pushes.pushes is not None
    result = run(model, optimisers, settings(centring=0.0))
    assert result.health["noise_share"] is None
    assert optimisers.pushes.pushes is None
    assert optimisers.pushes.chance is None


def test_the_same_push_in_batch_after_batch_is_left_in(model: LoraModel) -> None:
    """One batch alone may be chance; with a policy that hardly moves, the same pushes again and again are not."""
    chosen = settings(policy_lr=1e-12, policy_steps=1, critic_steps=1, value_lr=1e-12)
    optimisers = build_optimisers(model, chosen)
    shares = [torch.tensor(run(model, optimisers, chosen).health["noise_share"]) for _ in range(8)]
    gained = torch.stack(shares)
    assert gained.shape == (8, 2)
    assert bool((gained[-1] < 1).all())
    assert bool((gained[1:] <= gained[:-1] + 1e-6).all())


def test_evidence_from_a_checkpoint_goes_to_where_the_batch_is() -> None:
    """A checkpoint is read to the CPU; the batch may be on another device ("meta" is one that every build has)."""

    def sums(device: str) -> PushSums:
        ones: Tensor = torch.ones(2, device=device)
        return PushSums(torch.ones(2, 4, device=device), ones, ones, ones.long())

    saved, evidence = PushEvidence(), PushEvidence()
    saved.add(sums("cpu"))
    evidence.load_state_dict(saved.state_dict())
    evidence.add(sums("meta"))
    assert evidence.pushes is not None
    assert evidence.chance is not None
    assert (evidence.pushes.device.type, evidence.chance.device.type) == ("meta", "meta")
