"""A tiny random Llama with a real byte-level tokenizer, and LoRA adapters for it: enough for any engine, no download.

head_dim is 32, the smallest that vLLM's CPU attention takes.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 1024
VOCABULARY = 320
EOS = "<|im_end|>"
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "route each ticket to one queue: red, green or blue",
    "my invoice is wrong and I would like my money back",
    "naïve café, żółć, 日本語 🙂",
]


def build_base_model(
    directory: Path, *, seed: int = 0, context: int = CONTEXT, tie_word_embeddings: bool = True
) -> Path:
    """Writes a float32 model and tokenizer in Hugging Face layout; logits spread enough for sampling to matter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token="<|endoftext|>")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        initializer_range=0.15,
        bos_token_id=fast.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        tie_word_embeddings=tie_word_embeddings,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def perturbed_model(
    base: Path, directory: Path, *, seed: int, scale: float = 0.05, dtype: torch.dtype = torch.float32
) -> Path:
    """Writes the base model with noise on every weight, tokenizer included: what training all weights leaves behind."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    model.to(dtype).save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(base).save_pretrained(directory)
    return directory


def build_adapter(base: Path, directory: Path, *, seed: int, rank: int = 8, **config: object) -> Path:
    """Writes a PEFT LoRA directory over all linear layers; B is not zero, so that every adapter answers otherwise."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings: dict[str, object] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "bias": "none"}
    peft_model = get_peft_model(model, LoraConfig(**(settings | config)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.15, generator=generator)
    peft_model.save_pretrained(directory)
    return directory
