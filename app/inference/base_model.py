"""A base model directory as the gateway reads it: context, vocabulary, tokenizer. Whoever made it may have erred."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

_WRONG = (ValueError, TypeError, KeyError, AttributeError)
"""What well-meant code raises on values of another kind than it takes."""


class ModelUnreadable(Exception):
    """The directory holds no model that can be served; the message says what is missing or wrong."""


class ModelAbsent(ModelUnreadable):
    """There is no config.json: perhaps the model is still to come."""


@dataclass(frozen=True)
class BaseModel:
    context_length: int
    vocabulary_size: int
    tokenizer: PreTrainedTokenizerFast


def read_base_model(directory: Path) -> BaseModel:
    """
    Raises:
        ModelUnreadable: config.json or tokenizer.json is missing, or cannot be used.
    """
    config = _config(directory)
    _check_tokenizer(directory)
    try:
        # its constructor may fail in many ways on a tokenizer_config.json that is not what it should be
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except (OSError, *_WRONG) as error:
        raise ModelUnreadable(f"the tokenizer in {directory} cannot be used: {error!r}") from error
    return BaseModel(_count(directory, config, "max_position_embeddings"), _count(directory, config, "vocab_size"),
                     tokenizer)  # fmt: skip


def _config(directory: Path) -> dict[str, object]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelAbsent(f"{directory} holds no config.json") from error
    except OSError as error:
        raise ModelUnreadable(f"{directory}/config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnreadable(f"{directory}/config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnreadable(f"{directory}/config.json is no JSON object")
    return config


def _count(directory: Path, config: dict[str, object], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ModelUnreadable(f"{directory}/config.json states no {name}")
    return value


def _check_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ModelUnreadable(f"{directory} holds no tokenizer.json") from error
    except OSError as error:
        raise ModelUnreadable(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnreadable(f"{path} is no text: {error}") from error
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelUnreadable(f"{path} holds no tokenizer: {error}") from error
