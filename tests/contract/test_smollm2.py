"""The default base model in both dtypes: the numbers that the learner relies on, under a mixed load."""

import asyncio
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.engine.client import ControlClient, EngineClient, EngineCompletion, Sampling
from app.settings import Settings
from learner.prepare import ensure_base_model
from tests.contract.engines import start
from tests.contract.reference import Reference
from tests.contract.test_completions import with_client

TEMPERATURES = [1.0, 0.7]
EXAMPLES = (
    "<|im_start|>system\nRoute each ticket to one queue: red, green or blue.<|im_end|>\n"
    "<|im_start|>user\nMy invoice from last month is wrong.<|im_end|>\n<|im_start|>assistant\nblue<|im_end|>\n"
    "<|im_start|>user\nThe app crashes when I open the settings.<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
)
TICKETS = [
    "Where is my parcel?",
    "I was charged twice for the same order and nobody answers my messages about it. Please help me.",
]


def write_adapter(base: Path, directory: Path, seed: int) -> Path:
    """B as large as after some dozen updates: log-probs move by tenths of a nat."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft_model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.02 if "lora_A" in name else 0.005, generator=generator)
    peft_model.save_pretrained(directory)
    return directory


# bf16 differs between any two ways to compute it: transformers' eager and sdpa attention by 0.04 on such texts
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 1e-5, 1e-4), ("bfloat16", 0.06, 1.0)])
def test_logprobs_of_the_default_model(dtype: str, mean: float, largest: float, tmp_path: Path) -> None:
    base = ensure_base_model(Settings(home=tmp_path, dtype=dtype))  # type: ignore[arg-type]
    adapters = {name: write_adapter(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [
        tokenizer.encode(f"{EXAMPLES}<|im_start|>user\n{ticket}<|im_end|>\n<|im_start|>assistant\n")
        for ticket in TICKETS
    ]
    cases = [
        (model, prompt, Sampling(16, temperature=temperature, seed=7))
        for model in ("one", "two", "base")
        for temperature in TEMPERATURES
        for prompt in prompts
    ]
    with start("embedded", base, tmp_path / "engine.log", dtype) as engine:
        control = ControlClient()
        for name, path in adapters.items():
            control.load_adapter(engine.url, name, str(path))

        async def body(client: EngineClient) -> list[EngineCompletion]:
            return await asyncio.gather(*(client.complete(engine.url, m, p, s) for m, p, s in cases))

        results = with_client(body)
    reference = Reference(base, adapters, getattr(torch, dtype))
    differences: list[float] = []
    for (model, prompt, sampling), done in zip(cases, results, strict=True):
        assert done.logprobs is not None
        expected = reference.logprobs(model, prompt, done.token_ids, sampling.temperature)
        differences.extend(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))
    print(f"{dtype}: mean {sum(differences) / len(differences):.2e}, max {max(differences):.2e}")
    assert sum(differences) / len(differences) < mean
    assert max(differences) < largest
