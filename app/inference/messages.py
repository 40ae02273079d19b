"""OpenAI's chat messages -> plain (role, text) messages. What a text model cannot take is refused by name."""

from typing import Any

from renderers import Message

from app.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The developer role is the newer name of the system role."""


def plain_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages with texts only. Raises InvalidRequest that names the message and part."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], param: str) -> Message:
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise _unsupported(f"{param}: tools are not served by this policy yet: send texts only.", param)
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"'{param}.role' is {str(role)[:64]!r}: use one of {', '.join(ROLES)}.",
            code="invalid_value",
            param=f"{param}.role",
        )
    for name in ("audio", "refusal"):
        if message.get(name) is not None:
            raise _unsupported(f"'{param}.{name}' is not served: send its text as content.", f"{param}.{name}")
    return Message(role=ROLES[role], content=_text(message.get("content"), f"{param}.content"))


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"'{param}' is missing: add a text.", code="missing_field", param=param)
    if not isinstance(content, list):
        raise InvalidRequest(f"'{param}' must be a text or a list of text parts.", code="invalid_value", param=param)
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(
            f'\'{param}\' must be an object such as {{"type": "text", "text": "..."}}.',
            code="invalid_value",
            param=param,
        )
    if kind != "text":
        raise _unsupported(f"'{param}' is of type {kind[:64]!r}: this policy takes text parts only.", f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"'{param}.text' must be a text.", code="invalid_value", param=f"{param}.text")
    return str(part["text"])


def _unsupported(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="unsupported_content", param=param)
