from pathlib import Path

import pytest

from tests.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base-model")
    write_tokenizer(directory)
    return directory
