"""Which dtype the packaged model is converted to."""

import pytest
import torch

import learner.faster_dtype
from learner.faster_dtype import faster_dtype, seconds_of


@pytest.mark.parametrize(
    ("bfloat16_s", "float32_s", "expected"),
    [(0.1, 0.4, "bfloat16"), (0.4, 0.2, "float32")],
)
def test_on_a_cpu_the_faster_product_decides(
    monkeypatch: pytest.MonkeyPatch, bfloat16_s: float, float32_s: float, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seconds = {torch.bfloat16: bfloat16_s, torch.float32: float32_s}
    monkeypatch.setattr(learner.faster_dtype, "seconds_of", lambda left, right: seconds[left.dtype])
    assert faster_dtype() == expected


def test_one_slow_round_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seconds = iter([9.0, 0.2, 0.1, 9.0, 0.1, 0.2, 9.0, 0.2, 9.0, 0.2])  # bfloat16, float32 in turns
    monkeypatch.setattr(learner.faster_dtype, "seconds_of", lambda left, right: next(seconds))
    assert faster_dtype() == "bfloat16"


def test_a_product_takes_time() -> None:
    assert 0 < seconds_of(torch.ones(64, 64), torch.ones(64, 64)) < 60


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_says_itself(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert faster_dtype() == expected
