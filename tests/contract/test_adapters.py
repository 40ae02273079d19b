"""Health, models, loading and unloading, and the probe that a canary reads."""

from pathlib import Path

import httpx
import pytest
import torch

from app.engine.client import AdapterNotLoaded, AdapterRejected, ControlClient, Sampling, ServedModel
from tests.contract.conftest import ModelFiles
from tests.contract.engines import MAX_LORA_RANK, RunningEngine
from tests.contract.reference import Reference
from tests.contract.test_completions import PROMPTS, assert_reference, complete
from tests.contract.tiny_model import CONTEXT, build_adapter


def test_health(engine: RunningEngine, control: ControlClient) -> None:
    assert control.health(engine.url)
    assert not control.health("http://127.0.0.1:9")


def test_models_lists_the_base_and_its_adapters(
    engine: RunningEngine, control: ControlClient, files: ModelFiles
) -> None:
    base, *adapters = control.models(engine.url)
    assert base == ServedModel("base", str(files.base), None, CONTEXT)
    assert ServedModel("one", str(files.adapters["one"]), "base", None) in adapters


def test_an_adapter_comes_and_goes(
    engine: RunningEngine, control: ControlClient, files: ModelFiles, tmp_path: Path
) -> None:
    path = build_adapter(files.base, tmp_path / "third", seed=33, use_rslora=True, alpha_pattern={"q_proj": 5})
    with pytest.raises(AdapterNotLoaded, match="does not exist"):
        complete(engine, "third", PROMPTS[0], Sampling(max_tokens=1))
    control.load_adapter(engine.url, "third", str(path))
    assert "third" in {model.id for model in control.models(engine.url)}
    done = complete(engine, "third", PROMPTS[0], Sampling(max_tokens=5, seed=1))
    assert_reference(Reference(files.base, {"third": path}), "third", PROMPTS[0], done)
    with pytest.raises(AdapterRejected, match="already been loaded"):
        control.load_adapter(engine.url, "third", str(path))
    control.unload_adapter(engine.url, "third")
    assert "third" not in {model.id for model in control.models(engine.url)}
    with pytest.raises(AdapterNotLoaded, match="does not exist"):
        complete(engine, "third", PROMPTS[0], Sampling(max_tokens=1))
    with pytest.raises(AdapterNotLoaded):
        control.unload_adapter(engine.url, "third")


def test_more_adapters_than_fit_in_memory_are_all_served(
    engine: RunningEngine, control: ControlClient, files: ModelFiles, tmp_path: Path
) -> None:
    paths = {f"many-{n}": build_adapter(files.base, tmp_path / f"many-{n}", seed=100 + n) for n in range(9)}
    for name, path in paths.items():
        control.load_adapter(engine.url, name, str(path))
    reference = Reference(files.base, paths)
    for name in ("many-0", "many-8", "many-4"):
        done = complete(engine, name, PROMPTS[1], Sampling(max_tokens=3, seed=1))
        assert_reference(reference, name, PROMPTS[1], done)
    for name in paths:
        control.unload_adapter(engine.url, name)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rank": 2 * MAX_LORA_RANK}, "rank"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_an_adapter_that_would_be_served_wrongly_is_refused(
    engine: RunningEngine,
    control: ControlClient,
    files: ModelFiles,
    tmp_path: Path,
    settings: dict[str, object],
    reason: str,
) -> None:
    path = build_adapter(files.base, tmp_path / "refused", seed=1, **settings)  # type: ignore[arg-type]
    with pytest.raises(AdapterRejected, match=reason):
        control.load_adapter(engine.url, "refused", str(path))
    assert "refused" not in {model.id for model in control.models(engine.url)}


def test_a_path_without_an_adapter_is_refused(
    engine: RunningEngine, control: ControlClient, files: ModelFiles, tmp_path: Path
) -> None:
    for path in (tmp_path / "nothing", files.base):
        with pytest.raises(AdapterRejected, match="No adapter found"):
            control.load_adapter(engine.url, "nothing", str(path))
    with pytest.raises(AdapterRejected, match="base model"):
        control.load_adapter(engine.url, "base", str(files.adapters["one"]))
    missing = httpx.post(f"{engine.url}/v1/load_lora_adapter", json={"lora_path": "x"}, trust_env=False)
    assert missing.status_code == httpx.codes.BAD_REQUEST


def test_top_logprobs_are_the_likeliest_tokens(
    engine: RunningEngine, control: ControlClient, reference: Reference
) -> None:
    top = control.top_logprobs(engine.url, "two", PROMPTS[0], 20)
    expected, ids = torch.log_softmax(reference.logits("two", PROMPTS[0])[-1], dim=-1).topk(20)
    assert set(ids.tolist()) <= set(top)
    assert len(top) <= 21
    assert [top[token] for token in ids.tolist()] == pytest.approx(expected.tolist(), abs=1e-4)
