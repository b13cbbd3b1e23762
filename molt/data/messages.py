"""Chat messages as data sets write them, brought to one normal form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
"""role and content (a string), and what else the template may want: tool_calls, tool_call_id, name, reasoning_content."""

TURN_KEY = "molt_turn"
"""Key under which an assistant message names the model call that sampled it; templates never see it."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def normal_messages(value: Any, path: str) -> tuple[Message, ...]:
    """Messages from a string (one user message) or a list of messages; ValueError names the key path of what is wrong."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        raise ValueError(f"{path} is one object; it must be a string or a list of messages")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path} is {_kind(value)}; it must be a string or a list of messages")
    if not value:
        raise ValueError(f"{path} is an empty list; it must hold at least one message")
    return tuple(_message(item, f"{path}[{place}]") for place, item in enumerate(value))


def _message(item: Any, path: str) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{path} is {_kind(item)}; a message is an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        raise ValueError(f"{path}.role is {role!r}; it must be one of {', '.join(sorted(ROLES))}")
    message = {key: value for key, value in item.items() if value is not None and key != "content"}
    message["content"] = _content(item.get("content"), f"{path}.content", is_optional=bool(item.get("tool_calls")))
    return message


def _content(content: Any, path: str, *, is_optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if not isinstance(content, list | tuple):
        raise ValueError(f"{path} is {_kind(content)}; it must be a string or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            said = f"of type {kind!r}" if kind else _kind(part)
            raise ValueError(f"{path}[{place}] is {said}; text parts alone are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{path}[{place}].text is {_kind(part.get('text'))}; it must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
