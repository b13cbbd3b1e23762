"""Tool calls in the text of a model: the <tool_call>{"name": ..., "arguments": {...}}</tool_call> form of Hermes and Qwen models.

Only the text of an Action is ever read, so that what users and tools write can spell a call without making one. Detection is
by text, never by ids, since a marker's last character may be merged with what follows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
REASONING_END = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model wrote, or tried to."""

    name: str
    """Empty when it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str | None = None
    """The id that the model wrote, in formats that have one."""
    raw: str = ""
    """The text between the markers, as written."""
    problem: str | None = None
    """What is wrong with it, in words that can be given back to the model as the call's result; None for a good call."""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer, in order, bad ones included; reasoning is not searched. Nothing is guessed or coerced."""
    calls, position = [], max(reasoning_end(text, REASONING_END), 0)
    while (opening := text.find(OPENING, position)) >= 0:
        start = opening + len(OPENING)
        end = _end_of_json(text, start)
        if end is None:
            end = text.find(CLOSING, start)
        is_closed = end >= 0
        raw = text[start:end] if is_closed else text[start:]
        calls.append(_call(raw, is_closed=is_closed))
        position = end + len(CLOSING) if is_closed else len(text)
    return calls


def reasoning_end(text: str, marker: str) -> int:
    """Where the closing marker of reasoning ends, -1 without one: the first that no argument of a call spells."""
    calls = list(_whole_calls(text)) if marker in text else []
    close = text.find(marker)
    while close >= 0 and (call := next((end for start, end in calls if start < close < end), None)) is not None:
        close = text.find(marker, call)
    return close + len(marker) if close >= 0 else -1


def _whole_calls(text: str) -> Iterator[tuple[int, int]]:
    """Character ranges of the calls whose JSON is whole."""
    position = 0
    while (opening := text.find(OPENING, position)) >= 0:
        position = opening + len(OPENING)
        if (end := _end_of_json(text, position)) is not None:
            yield opening, end
            position = end


def _end_of_json(text: str, start: int) -> int | None:
    """Where the closing marker after a whole JSON object begins, which may spell that marker itself; None without one."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        _, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    close = text.find(CLOSING, end)
    return close if close >= 0 and not text[end:close].strip() else None


_DECODER = json.JSONDecoder()


def _call(raw: str, *, is_closed: bool) -> ToolCall:
    if not is_closed:
        return ToolCall(name="", raw=raw, problem="the call is not closed by </tool_call>")
    try:
        said = json.loads(raw, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once_each)
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall(name="", raw=raw, problem="the call holds an escape of half a character")
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", raw=raw, problem=f"the call is not JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not said["name"]:
        return ToolCall(name="", raw=raw, problem='the call is not an object with a "name"')
    arguments = said.get("arguments", {})
    call_id = said["id"] if isinstance(said.get("id"), str) else None
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(name=said["name"], call_id=call_id, raw=raw, problem=f'"arguments" is a {kind}, it must be an object')
    return ToolCall(name=said["name"], arguments=arguments, call_id=call_id, raw=raw)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is larger than any number here")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
