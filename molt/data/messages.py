"""Chat messages as data sets write them, brought to one normal form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from molt.data.images import MARKER, PART_KINDS, Image, ImageReader

Message = dict[str, Any]
"""role and content (a string, or parts where it has images), and what else the template may want: tool_calls, tool_call_id, name ..."""

TURN_KEY = "molt_turn"
"""Key under which an assistant message names the model call that sampled it; templates never see it."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def text_part(text: str) -> dict[str, Any]:
    """A part of a message's content that is text."""
    return {"type": "text", "text": text}


def image_part(image: Image) -> dict[str, Any]:
    """A part of a message's content that is an image."""
    return {"type": "image", "image": image}


def texts_of(content: Any) -> list[str]:
    """The texts of a content, in order."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part["type"] == "text"]


def images_of(messages: Iterable[Message]) -> list[Image]:
    """The images of a chat, in order."""
    contents = (message.get("content") for message in messages)
    return [part["image"] for content in contents if isinstance(content, list) for part in content if part["type"] == "image"]


def normal_messages(value: Any, path: str, images: ImageReader | None = None) -> tuple[Message, ...]:
    """Messages from a string (one user message) or a list of messages; ValueError names the key path of what is wrong.

    images: where their images come from; without it an image is refused.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        raise ValueError(f"{path} is one object; it must be a string or a list of messages")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path} is {_kind(value)}; it must be a string or a list of messages")
    if not value:
        raise ValueError(f"{path} is an empty list; it must hold at least one message")
    return tuple(_message(item, f"{path}[{place}]", images) for place, item in enumerate(value))


def told_as_text(value: Any) -> Any:
    """The list of messages that a column of texts holds as JSON, as files of columns with one type must; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        told = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return told if told and all(isinstance(item, dict) and "role" in item for item in told) else value


def _message(item: Any, path: str, images: ImageReader | None) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{path} is {_kind(item)}; a message is an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        raise ValueError(f"{path}.role is {role!r}; it must be one of {', '.join(sorted(ROLES))}")
    message = {key: value for key, value in item.items() if value is not None and key not in ("content", TURN_KEY)}
    _check_calls(message, path)
    message["content"] = _content(item.get("content"), f"{path}.content", images, is_optional=bool(item.get("tool_calls")))
    return message


def _check_calls(message: Mapping[str, Any], path: str) -> None:
    """Refuse calls that a template would show as something else, or not at all."""
    calls = message.get("tool_calls") or []
    if calls and message["role"] != "assistant":
        raise ValueError(f"{path}.tool_calls stands in a message of role {message['role']}; the assistant alone calls")
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{path}.tool_calls is {_kind(calls)}; it must be a list of calls")
    for place, call in enumerate(calls):
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{path}.tool_calls[{place}] names no function; a call has a function with name and arguments")


def _content(content: Any, path: str, images: ImageReader | None, *, is_optional: bool) -> str | list[dict[str, Any]]:
    """A text, or parts where there is an image among them."""
    if isinstance(content, str):
        return _joined(_marked(content, path, images))
    if content is None and is_optional:
        return ""
    if not isinstance(content, list | tuple):
        raise ValueError(f"{path} is {_kind(content)}; it must be a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PART_KINDS and images is not None:
            parts.append(image_part(images.of_part(part, f"{path}[{place}]")))
            continue
        if kind not in TEXT_PARTS:
            said = f"of type {kind!r}" if kind else _kind(part)
            raise ValueError(f"{path}[{place}] is {said}; {'text and image' if images else 'text'} parts alone are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{path}[{place}].text is {_kind(part.get('text'))}; it must be a string")
        parts += _marked(part["text"], f"{path}[{place}].text", images)
    return _joined(parts)


def _marked(text: str, path: str, images: ImageReader | None) -> list[dict[str, Any]]:
    """A text as parts: where the row has a column of images, each marker in it stands for the next one."""
    if images is None or not images.has_column:
        return [text_part(text)]
    first, *others = text.split(MARKER)
    parts = [text_part(first)]
    for other in others:
        parts += [image_part(images.next_of_column(path)), text_part(other)]
    return parts


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Neighbouring texts as one; a string when there is no image."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and merged and merged[-1]["type"] == "text":
            merged[-1] = text_part(merged[-1]["text"] + part["text"])
        elif part != text_part(""):
            merged.append(part)
    if all(part["type"] == "text" for part in merged):
        return "".join(part["text"] for part in merged)
    return merged


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
