"""Which dtype the base weights have, in engine and learner alike: both must sample and score with the same numbers."""

import json
from pathlib import Path
from typing import Literal

Dtype = Literal["bfloat16", "float32"]


def resolve_dtype(setting: Literal["auto", "bfloat16", "float32"], base_model: Path) -> Dtype:
    """The dtype that `base_model` is loaded in; `auto` is that of its files, and bfloat16 where they have another.

    The files decide, not the machine that asks, so that every process finds the same answer on any machine that the
    home is moved to. The packaged default is written in what is faster where it is prepared (learner.prepare).

    Raises:
        OSError, ValueError: the directory has no readable config.json, or weights.
    """
    if setting != "auto":
        return setting
    config = json.loads((base_model / "config.json").read_text())
    texts = (config, config.get("text_config") or {})
    names = [text.get(key) for text in texts for key in ("dtype", "torch_dtype")]  # transformers 5, and before
    stored = next((str(name).removeprefix("torch.") for name in names if name), None) or _of_weights(base_model)
    return "float32" if stored == "float32" else "bfloat16"


def _of_weights(base_model: Path) -> str:
    """That of the first tensor in the first file, from its header: 8 bytes of length, then JSON
    (https://huggingface.co/docs/safetensors, Format)."""
    with min(base_model.glob("*.safetensors")).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    dtypes = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return "float32" if dtypes == {"F32"} else "bfloat16"
