"""TRL's policy step (GRPOTrainer of trl 1.16) on a batch of ours."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.trajectory import Trajectory


def trl_step(trajectories: Sequence[Trajectory], base: Path, dtype: str, *, checkpointing: bool) -> Callable[[], float]:
    """One `compute_loss`, backward pass and AdamW step; returns its seconds. The batch is padded, as TRL does."""
    trainer = prepared_trainer(len(trajectories), base, dtype, checkpointing=checkpointing)
    model, optimiser = trainer.model_wrapped, trainer.optimizer
    inputs = padded(trajectories)

    def step() -> float:
        started = time.perf_counter()
        loss = trainer.compute_loss(model, inputs)
        trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return time.perf_counter() - started

    return step


def prepared_trainer(rollouts: int, base: Path, dtype: str, *, checkpointing: bool) -> Any:
    """A GRPOTrainer as its `train()` makes it ready for the first step: `model_wrapped` and `optimizer` are prepared.

    The constructor alone turns no checkpointing on, and only a prepared model brings its own bfloat16 autocast.
    """
    import pyarrow
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as scratch:
        options = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=dtype == "bfloat16",
            gradient_checkpointing=checkpointing,
            per_device_train_batch_size=rollouts,
            num_generations=rollouts,
            learning_rate=1.5e-4,
            weight_decay=0.0,
            report_to=[],
        )
        trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype), local_files_only=True),
            reward_funcs=_no_reward,
            args=options,
            # its own fingerprint of a table fails with pyarrow 26
            train_dataset=Dataset(pyarrow.table({"prompt": ["unused"]}), fingerprint="unused"),
            processing_class=AutoTokenizer.from_pretrained(base, local_files_only=True),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    trainer.current_gradient_accumulation_steps = 1  # what its training loop would have set
    if checkpointing:
        trainer.model.activation_checkpointing_enable(options.activation_checkpointing_kwargs)
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model.train(), trainer.optimizer)
    return trainer


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def padded(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """The inputs of `compute_loss`: prompts padded on the left, completions on the right; observations within a
    completion are masked by `tool_mask`."""
    starts = [int(t.action_positions[0]) for t in trajectories]
    prompts = [t.token_ids[:start].flip(0) for t, start in zip(trajectories, starts, strict=True)]
    completions = [t.token_ids[start:] for t, start in zip(trajectories, starts, strict=True)]
    acted = [
        torch.isin(torch.arange(start, len(t.token_ids)), t.action_positions)
        for t, start in zip(trajectories, starts, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    prompt_mask = pad([torch.ones_like(p) for p in prompts], batch_first=True).flip(1)
    completion_mask = pad([torch.ones_like(c) for c in completions], batch_first=True)
    tool_mask = pad([a.long() for a in acted], batch_first=True)
    behaviour = torch.full(completion_mask.shape, -10.8)
    return {
        "prompt_ids": pad(prompts, batch_first=True).flip(1),
        "prompt_mask": prompt_mask,
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([t.rollout_return for t in trajectories]) - 0.5,
        "old_per_token_logps": behaviour,
        "num_items_in_batch": tool_mask.sum(),
    }
