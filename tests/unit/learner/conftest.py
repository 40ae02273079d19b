"""Tiny random models for the learner's tests."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.policies.learning import LearningSettings
from learner.lora_model import LoraModel
from learner.prepare import write_version_zero

VOCABULARY = 97
SETTINGS = LearningSettings(lora_rank=4, value_rank=4)


def full_settings(**changes: object) -> LearningSettings:
    """Of a policy that trains full weights."""
    return LearningSettings.model_validate(changes, context={"training": "full"})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama (2 layers, hidden 64, head_dim 32, grouped queries) in Hugging Face layout.

    Its weights are ten times larger than a fresh model's, so that its distributions are far from uniform.
    """
    directory = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w2", pad_token="w2"
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def fresh_model(tiny_model: Path, tmp_path: Path) -> LoraModel:
    """At version 0: the policy equals the base, V is 0."""
    zero = write_version_zero("p", UUID(int=1), tiny_model, SETTINGS, tmp_path)
    return LoraModel(tiny_model, "float32", SETTINGS, Path(zero.path))


@pytest.fixture
def model(fresh_model: LoraModel) -> LoraModel:
    """With B and the value head away from zero, so that every adapter matters."""
    generator = torch.Generator().manual_seed(3)
    for parameter in (fresh_model.policy_parameters | fresh_model.value_parameters).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return fresh_model
