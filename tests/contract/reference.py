"""The numbers an engine must give: plain transformers and peft, one sequence at a time, no cache, none of our code."""

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """Base model and its adapters."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
        first, *others = adapters.items()
        self._model = PeftModel.from_pretrained(model, first[1], adapter_name=first[0])
        for name, path in others:
            self._model.load_adapter(path, adapter_name=name)
        self._model.eval().to(dtype)

    @torch.inference_mode()
    def logits(self, model: str, token_ids: list[int]) -> Tensor:
        """(L, V): logits after each token."""
        ids = torch.tensor([token_ids])
        if model == "base":
            with self._model.disable_adapter():
                return self._model(input_ids=ids, use_cache=False).logits[0]
        self._model.set_adapter(model)
        return self._model(input_ids=ids, use_cache=False).logits[0]

    def logprobs(self, model: str, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Natural log-probs of each completion token at the temperature."""
        return _gathered(self.logits(model, prompt + completion), prompt, completion, temperature)


class WholeModels:
    """Several models of one tokenizer: versions of a policy whose every weight is trained."""

    def __init__(self, directories: dict[str, Path], dtype: torch.dtype = torch.float32):
        self._models = {
            name: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval() for name, path in directories.items()
        }

    @torch.inference_mode()
    def logits(self, model: str, token_ids: list[int]) -> Tensor:
        """(L, V): logits after each token."""
        return self._models[model](input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    def logprobs(self, model: str, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Natural log-probs of each completion token at the temperature."""
        return _gathered(self.logits(model, prompt + completion), prompt, completion, temperature)


def _gathered(logits: Tensor, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    table = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
