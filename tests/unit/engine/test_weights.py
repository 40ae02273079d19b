"""New weights under running requests, on a stepped engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine.embedded.options import BLOCK_SIZE
from app.engine.embedded.weights import WeightsUnsupported
from tests.contract.reference import WholeModels
from tests.contract.tiny_model import build_base_model, perturbed_model
from tests.unit.engine.conftest import Driver, Files

PROMPT = list(range(5, 55))
Drive = Callable[..., Driver]


@pytest.fixture(scope="module")
def new_weights(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed_model(files.base, tmp_path_factory.mktemp("new") / "v1", seed=3)


@pytest.fixture(scope="module")
def models(files: Files, new_weights: Path) -> WholeModels:
    return WholeModels({"default": files.base, "v1": new_weights})


def swap(driver: Driver, directory: Path, label: str) -> None:
    driver.engine.pause(clear_cache=True)
    driver.engine.reload_weights(directory)
    driver.engine.weight_version = label
    driver.engine.resume()


def test_a_completion_that_spans_a_swap_follows_each_model_on_the_whole_context(
    drive: Drive, new_weights: Path, models: WholeModels
) -> None:
    driver = drive()
    name = driver.add(PROMPT, max_tokens=30)
    sequence = driver.engine._sequences[name]
    for _ in range(12):
        driver.step()
    swap(driver, new_weights, "v1")
    driver.run()
    tokens = driver.tokens(name)
    assert [(span.version, span.start, span.end) for span in sequence.weight_spans] == [
        ("default", 0, 12),
        ("v1", 12, 30),
    ]
    ids = [token.id for token in tokens]
    old = models.logprobs("default", PROMPT, ids)
    new = models.logprobs("v1", PROMPT, ids)
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1, "the two models must be told apart"
    assert [token.logprob for token in tokens] == pytest.approx(old[:12] + new[12:], abs=1e-4)


def test_what_is_paused_waits_and_what_comes_meanwhile_too(drive: Drive, new_weights: Path) -> None:
    driver = drive(max_num_seqs=1)
    running, waiting = (driver.add(PROMPT, max_tokens=5) for _ in range(2))
    driver.step()
    driver.engine.pause(clear_cache=True)
    late = driver.add(PROMPT, max_tokens=5)
    assert not driver.engine.busy
    assert driver.engine.abort(waiting) is not None, "a client may still leave"
    driver.engine.resume()
    driver.run()
    assert [driver.finish(name) for name in (running, late)] == ["length", "length"]
    assert driver.step_of_end(running) < driver.step_of_first_token(late), "the order of arrival is kept"
    assert driver.engine.scheduler.blocks.free == driver.engine.options.num_blocks


def test_a_paused_engine_that_keeps_its_cache_computes_nothing_twice(drive: Drive) -> None:
    driver = drive()
    driver.add(PROMPT, max_tokens=3)
    driver.step()
    driver.engine.pause(clear_cache=False)
    driver.engine.resume()
    driver.run()
    assert driver.engine.counts.computed_tokens == 50 + 2


def test_known_prefixes_are_forgotten_with_the_weights_that_computed_them(
    drive: Drive, new_weights: Path, models: WholeModels
) -> None:
    """Also by an engine that nobody paused, and back again: the old KV does not come back with the old weights."""
    driver = drive()
    for label, path in (("v1", new_weights), ("default", driver.engine.options.model)):
        driver.add(PROMPT, max_tokens=1)
        driver.run()
        driver.engine.reload_weights(path)
        hits = driver.engine.scheduler.prefix_hit_tokens
        name = driver.add(PROMPT, max_tokens=4)
        driver.run()
        assert driver.engine.scheduler.prefix_hit_tokens == hits
        ids = [token.id for token in driver.tokens(name)]
        expected = models.logprobs(label, PROMPT, ids)
        assert [token.logprob for token in driver.tokens(name)] == pytest.approx(expected, abs=1e-4)


def test_requests_share_prefixes_again_after_a_swap(drive: Drive, new_weights: Path) -> None:
    driver = drive()
    swap(driver, new_weights, "v1")
    for _ in range(2):
        driver.add(PROMPT, max_tokens=1)
        driver.run()
    assert driver.engine.counts.computed_tokens == 50 + 50 - 3 * BLOCK_SIZE


def test_an_untied_head_is_replaced_too(tmp_path: Path) -> None:
    base = build_base_model(tmp_path / "base", tie_word_embeddings=False)
    other = perturbed_model(base, tmp_path / "v1", seed=4)
    driver = Driver.on(base)
    swap(driver, other, "v1")
    name = driver.add(PROMPT, max_tokens=4)
    driver.run()
    ids = [token.id for token in driver.tokens(name)]
    expected = WholeModels({"v1": other}).logprobs("v1", PROMPT, ids)
    assert [token.logprob for token in driver.tokens(name)] == pytest.approx(expected, abs=1e-4)


def broken(directory: Path, how: str) -> Path:
    file = directory / "model.safetensors"
    if how == "no config":
        (directory / "config.json").unlink()
    elif how == "no weights":
        file.unlink()
    elif how == "half a file":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "a weight is missing":
        weights = load_file(file)
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, file, {"format": "pt"})
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return directory


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("no config", "config.json"),
        ("no weights", "cannot be loaded"),
        ("half a file", "cannot be loaded"),
        ("a weight is missing", "lacks the weights model.layers.1.mlp.up_proj.weight"),
        ("fewer layers", "another model"),
    ],
)
def test_what_cannot_be_served_changes_nothing(
    drive: Drive, files: Files, models: WholeModels, tmp_path: Path, how: str, why: str
) -> None:
    driver = drive()
    directory = broken(perturbed_model(files.base, tmp_path / "v1", seed=5), how)
    with pytest.raises(WeightsUnsupported, match=why):
        driver.engine.reload_weights(directory)
    name = driver.add(PROMPT, max_tokens=4)
    driver.run()
    ids = [token.id for token in driver.tokens(name)]
    expected = models.logprobs("default", PROMPT, ids)
    assert [token.logprob for token in driver.tokens(name)] == pytest.approx(expected, abs=1e-4)


def test_bfloat16_files_are_served_as_they_are(files: Files, tmp_path: Path) -> None:
    """A learner writes the engine's dtype: nothing is rounded a second time."""
    other = perturbed_model(files.base, tmp_path / "v1", seed=6, dtype=torch.bfloat16)
    driver = Driver.on(files.base, dtype="bfloat16")
    driver.engine.reload_weights(other)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(driver.engine.model._weights[name], load_file(other / "model.safetensors")[name])
