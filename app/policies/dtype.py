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
        OSError, ValueError: the directory has no readable config.json.
    """
    if setting != "auto":
        return setting
    config = json.loads((base_model / "config.json").read_text())
    stored = config.get("dtype") or config.get("torch_dtype")  # transformers 5 and before
    return "float32" if stored in (None, "float32") else "bfloat16"
