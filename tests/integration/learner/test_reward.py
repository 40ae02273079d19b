"""Learning raises the reward, whatever of the policy is trained and with which optimiser."""

import statistics
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from app.db.models import PolicyVersion
from app.db.session import Database
from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings, Training
from app.settings import Settings
from learner.worker import LearnWorker
from tests.integration.learner.scene import LEARNING, SHARED_PROMPT, Scene
from tests.unit.learner.conftest import full_settings

SPEED = {
    "rollouts_per_update": 32, "min_rollouts": 32, "lr_warmup_updates": 0, "policy_steps": 3, "critic_steps": 2,
    "lr_follows_shortfall": False,
}  # fmt: skip


def adapters(**changes: object) -> LearningSettings:
    return LEARNING.model_copy(update=SPEED | changes)


def all_weights(**changes: object) -> LearningSettings:
    """The defaults' learning rates are for a thousand times as many weights and updates."""
    rates = {"policy_lr": 1e-3, "value_lr": 1e-3, "critic_warmup_updates": 1, "max_staleness": None}
    return full_settings(**(SPEED | rates | changes))


@pytest.fixture
def settings(tmp_path: Path, dtype: Dtype) -> Settings:
    return Settings(home=tmp_path / "home", dtype=dtype)


@pytest.mark.parametrize(
    ("training", "dtype", "learning", "updates"),
    [
        ("lora", "float32", adapters(policy_optimiser="adamw", centring=0.0), 4),
        ("lora", "float32", adapters(policy_optimiser="preconditioned", centring=0.0), 8),
        ("lora", "float32", adapters(policy_optimiser="preconditioned", centring=0.95), 20),
        ("full", "float32", all_weights(centring=0.0), 4),
        ("full", "float32", all_weights(centring=0.95), 10),
        ("full", "bfloat16", all_weights(preset="paper"), 4),
    ],
)
def test_learning_raises_the_reward(
    settings: Settings,
    database: Database,
    tiny_model: Path,
    training: Training,
    learning: LearningSettings,
    updates: int,
) -> None:
    """Even tokens earn 1, whatever the prompt: their share rises, on prompts that were not trained too.

    What is right for every prompt is what centring, the preconditioner and the anchor of a critic that knows nothing
    yet slow down (docs/decisions/0009, 0010, 0014), and must not prevent.
    """
    scene = Scene(settings, database, tiny_model, learning, training=training)
    for _ in range(updates * 32):
        scene.rollout(action_tokens=1)
    worker = LearnWorker(settings, database)
    for _ in range(updates):
        worker.tick()
    assert scene.policy().head == updates - 1
    shares = [even_share(version, tiny_model, training) for version in scene.versions()]
    # the mean of the second half: with centring a single version is 0.05 from its neighbours by noise
    assert statistics.fmean(shares[len(shares) // 2 :]) > shares[0] + 0.1


def even_share(version: PolicyVersion, base: Path, training: Training) -> float:
    """Mean probability of an even token under a version's files, by plain transformers and peft."""
    whole = base if training == "lora" else version.path
    served = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    if training == "lora":
        served = PeftModel.from_pretrained(served, version.path)
    prompts = torch.tensor([[*SHARED_PROMPT, i, i + 1, i + 2, i + 3] for i in range(40, 60)])
    with torch.no_grad():
        probabilities = served(prompts).logits[:, -1].softmax(-1)
    return float(probabilities[:, ::2].sum(-1).mean())
