"""Are the log-probs that the server stored those of the version that it names? Asked of plain transformers and peft.

    .venv/bin/python -m benchmarks.stored_logprobs --database var/evergreen.db --versions 5 40 100

For interactions without a parent, sampled at temperature 1: one forward pass on the stored ids, the base model from its
directory and the version's adapter from its own, with none of the learner's or engine's model code. Prints per version
the mean and the largest absolute difference in nats. `--artifacts` reads the adapters from a copy of the directories.
"""

import argparse
import sqlite3
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

VERSION = """
SELECT v.path, p.base_model FROM policy_versions v JOIN policies p ON p.id = v.policy_id
WHERE p.name = ? AND v.number = ?
"""
INTERACTIONS = """
SELECT i.new_prompt_ids, i.completion_ids, i.logprobs FROM interactions i JOIN policies p ON p.id = i.policy_id
WHERE p.name = ? AND i.version = ? AND i.state = 'completed' AND i.parent_id IS NULL AND i.temperature = 1
LIMIT ?
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", type=Path, required=True, help="the server's SQLite file, or a backup of it")
    parser.add_argument("--artifacts", type=Path, help="a copy of the policy's directory of versions")
    parser.add_argument("--base-model", type=Path, help="if it is no longer where the database says")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--versions", type=int, nargs="+", required=True)
    parser.add_argument("--interactions", type=int, default=40, help="at most, per version")
    options = parser.parse_args()
    database = sqlite3.connect(f"file:{options.database}?mode=ro", uri=True)
    for number in options.versions:
        version = database.execute(VERSION, (options.policy, number)).fetchone()
        rows = database.execute(INTERACTIONS, (options.policy, number, options.interactions)).fetchall()
        if not version or not rows:
            print(f"version {number}: no such version, or no interaction that can be compared")
            continue
        stored_path, stored_base = version
        adapter = options.artifacts / Path(stored_path).name if options.artifacts else Path(stored_path)
        base = options.base_model or Path(stored_base)
        differences = of_version(base, adapter, rows)
        print(
            f"version {number}: {len(rows)} interactions, {differences.numel()} tokens, "
            f"mean {differences.mean().item():.2e}, largest {differences.max().item():.2e} nats",
            flush=True,
        )


def of_version(base: Path, adapter: Path, rows: list[tuple[bytes, bytes, bytes]]) -> torch.Tensor:
    """(tokens of all rows,) |stored log-prob - that of a fresh forward pass|, nats."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    model = PeftModel.from_pretrained(loaded, adapter).to(loaded.dtype).eval()
    differences = []
    for prompt_blob, completion_blob, logprobs_blob in rows:
        prompt, completion = np.frombuffer(prompt_blob, "<i4"), np.frombuffer(completion_blob, "<i4")
        ids = torch.from_numpy(np.concatenate([prompt, completion])).long().unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        fresh = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        differences.append((fresh - torch.from_numpy(np.frombuffer(logprobs_blob, "<f4").copy())).abs())
    return torch.cat(differences)


if __name__ == "__main__":
    main()
