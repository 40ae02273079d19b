"""JSON bodies at the door: what no database, engine or JSON reader downstream could hold is refused here, in words."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from app.errors import InvalidRequest

MAX_BODY_BYTES = 16 * 2**20
LARGE_BODY_BYTES = 16 * 1024
"""Reading and tokenising this much takes about a millisecond."""

T = TypeVar("T")

M = TypeVar("M", bound="Body")


class BodyTooLarge(InvalidRequest):
    status = 413


class UnsupportedMediaType(InvalidRequest):
    status = 415


class Body(BaseModel):
    """Base of every request model: types as JSON has them, finite numbers, no field that would be silently ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="forbid")


def json_body(model: type[Body]) -> dict[str, Any]:
    """OpenAPI's description of a body that an endpoint reads by itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_object(request: Request) -> tuple[dict[str, Any], bytes]:
    """The request's JSON object and its bytes. Raises InvalidRequest (400, 413, 415) that says what to do."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(
            f"The content type {media_type!r} is not read here: send JSON with 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    body = await _read_bytes(request)
    return await off_loop_if_large(len(body), lambda: _parse(body)), body


async def off_loop_if_large(body_bytes: int, work: Callable[[], T]) -> T:
    """What takes time in proportion to a body: a large one's in a thread, so that nobody else waits for it."""
    return await asyncio.to_thread(work) if body_bytes > LARGE_BODY_BYTES else work()


def validated(model: type[M], value: dict[str, Any]) -> M:
    """`value` as the request model. Raises InvalidRequest that names the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise unknown_field(errors, model) or invalid_fields(errors, value) from None


def unknown_field(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> InvalidRequest | None:
    """If pydantic complains of a field that `model` does not have: the first such complaint."""
    unknown = next((each["loc"] for each in errors if each["type"] == "extra_forbidden"), None)
    if unknown is None:
        return None
    return InvalidRequest(
        f"{unknown[-1]!r} is not read here: remove it, or use one of {', '.join(model.model_fields)}.",
        code="unknown_field",
        param=".".join(map(str, unknown)),
    )


def invalid_fields(errors: Sequence[ErrorDetails], value: Any) -> InvalidRequest:
    """pydantic's complaints about `value` as one error: what is said about the first field that is wrong."""
    first = errors[0]
    param = _param(first, value)
    if first["type"] == "missing":
        return InvalidRequest(f"'{param}' is missing: add it.", code="missing_field", param=param)
    said = dict.fromkeys(_message(error) for error in errors if _param(error, value) == param)
    where = f"'{param}' is not valid: " if param else ""  # a rule between two fields names them itself
    return InvalidRequest(f"{where}{', or '.join(said)}.", code="invalid_value", param=param or None)


def _param(error: ErrorDetails, value: Any) -> str:
    """Where in `value` the error is, such as messages[0].role. The members of a union, which pydantic names in between,
    are in no value and are left out.
    """
    param = ""
    for item in error["loc"]:
        if isinstance(item, int) and isinstance(value, list) and item < len(value):
            param += f"[{item}]"
            value = value[item]
        elif isinstance(value, dict) and (item in value or error["type"] == "missing"):
            param += f".{item}" if param else f"{item}"
            value = value.get(item)
    return param


def _message(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        _explain(body, error)
    if _SUSPICIOUS.search(body):
        _refuse_unstorable(value)
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The body is a JSON {_json_name(value)}: send a JSON object, {{...}}.", code="invalid_json"
        )
    return value


async def _read_bytes(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(
                f"The body is larger than {MAX_BODY_BYTES} bytes: send less in one request.", code="body_too_large"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def _explain(body: bytes, error: ValueError) -> NoReturn:
    """The fast reader has refused the body; Python's, which takes more, says what was odd about it."""

    def refuse_constant(name: str) -> NoReturn:
        raise InvalidRequest(
            f"The body holds {name}, which is no JSON number: send a finite number.", code="invalid_number"
        )

    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except RecursionError:
        value = None
    except ValueError:
        raise InvalidRequest(
            f"The body is not JSON ({error}): send one JSON object in UTF-8.", code="invalid_json"
        ) from None
    if not str(error).startswith(("recursion limit", "number out of range")):
        _refuse_unstorable(value)
        raise InvalidRequest(
            f"The body is not JSON in UTF-8 without a byte order mark ({error}): send it so.", code="invalid_json"
        ) from None
    raise InvalidRequest(
        f"The body cannot be read as JSON ({error}): send a flatter object with numbers of ordinary size.",
        code="invalid_json",
    ) from None


_SUSPICIOUS = re.compile(rb"\\u0000|[0-9.][eE]\+?[0-9]{3}|[0-9]{19}")
"""Bodies that may hold NUL or a number beyond 64 bits; few do, so that most need no walk over their values."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _refuse_unstorable(value: Any, param: str = "") -> None:
    """Raises InvalidRequest for the first text, key or number in `value` that a database or engine could not hold."""
    if isinstance(value, str):
        found = _UNSTORABLE.search(value)
        if found:
            kind = "NUL, which cannot be stored" if found.group() == "\x00" else "a lone surrogate, no character"
            raise InvalidRequest(
                f"'{param}' holds \\u{ord(found.group()):04x} ({kind}): remove or replace it.",
                code="invalid_text",
                param=param,
            )
    elif isinstance(value, int | float):
        if not -(2**63) <= value < 2**64:
            raise InvalidRequest(
                f"'{param}' is too large a number: send one that fits 64 bits.", code="invalid_number", param=param
            )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unstorable(item, f"{param}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{param}.{key}" if param else key
            _refuse_unstorable(key, ascii(inner)[1:-1])
            _refuse_unstorable(item, inner)


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "string", list: "array", bool: "boolean"}
    return names.get(type(value), "number")
