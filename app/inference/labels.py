"""What a request says about itself besides its prompt: which rollout it belongs to, tags, and whether to train it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import InvalidRequest

IDENTIFIER = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RESERVED = frozenset({"rollout_id", "train"})


@dataclass(frozen=True)
class Labels:
    rollout: str | None
    """The caller's own name of the rollout; None: the call is a rollout of its own."""
    tags: dict[str, str | bool]
    opted_out: bool


def read_labels(metadata: Mapping[str, str | bool] | None, header: str | None) -> Labels:
    """
    Args:
        metadata: the request's; `rollout_id` and `train` are ours, the others become the rollout's tags.
        header: X-Rollout-Id.

    Raises:
        InvalidRequest: a name that cannot be one, two different names, or a `train` that is neither true nor false.
    """
    metadata = metadata or {}
    named = metadata.get("rollout_id")
    if isinstance(named, bool):
        raise _invalid_name("metadata.rollout_id")
    if header is not None and named is not None and header != named:
        raise InvalidRequest(
            "The header X-Rollout-Id and metadata.rollout_id name two rollouts: send one of them.",
            code="rollout_id_conflict",
            param="metadata.rollout_id",
        )
    for value, param in ((header, "X-Rollout-Id"), (named, "metadata.rollout_id")):
        if value is not None and not IDENTIFIER.fullmatch(value):
            raise _invalid_name(param)
    train = metadata.get("train", True)
    if train not in (True, False, "true", "false"):
        raise InvalidRequest(
            "'metadata.train' must be true or false: leave it out to let the request be trained.",
            code="invalid_value",
            param="metadata.train",
        )
    return Labels(
        rollout=named if header is None else header,
        tags={key: value for key, value in metadata.items() if key not in _RESERVED},
        opted_out=train in (False, "false"),
    )


def _invalid_name(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' must be 1 to 128 letters, digits, '.', '_', ':' or '-'.", code="invalid_rollout_id", param=param
    )
