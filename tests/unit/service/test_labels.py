"""What a request says about itself: its rollout's name, tags, and whether it may be trained."""

from typing import Any

import pytest

from app.errors import InvalidRequest
from app.inference.labels import read_labels


def test_nothing_said():
    labels = read_labels(None, None)
    assert (labels.rollout, labels.tags, labels.opted_out) == (None, {}, False)


@pytest.mark.parametrize(
    ("metadata", "header", "name"),
    [({"rollout_id": "a.b_c:d-1"}, None, "a.b_c:d-1"), ({}, "x", "x"), ({"rollout_id": "x"}, "x", "x")],
)
def test_the_rollouts_name(metadata: dict[str, Any], header: str | None, name: str):
    assert read_labels(metadata, header).rollout == name


def test_other_metadata_are_tags():
    labels = read_labels({"rollout_id": "x", "train": "true", "env": "tickets", "ok": True}, None)
    assert labels.tags == {"env": "tickets", "ok": True}


@pytest.mark.parametrize(("said", "opted_out"), [(False, True), ("false", True), (True, False), ("true", False)])
def test_opting_out(said: str | bool, opted_out: bool):
    assert read_labels({"train": said}, None).opted_out is opted_out


@pytest.mark.parametrize(
    ("metadata", "header"),
    [
        ({"train": "no"}, None),
        ({"train": ""}, None),
        ({"rollout_id": True}, None),
        ({"rollout_id": "a b"}, None),
        ({"rollout_id": ""}, None),
        ({"rollout_id": "é"}, None),
        ({"rollout_id": "x" * 129}, None),
        ({"rollout_id": "a\n"}, None),
        (None, ""),
        ({"rollout_id": "a"}, "b"),
    ],
)
def test_refused(metadata: dict[str, Any] | None, header: str | None):
    with pytest.raises(InvalidRequest):
        read_labels(metadata, header)
