"""Tool calls in the text of a model: the <tool_call>{"name": ..., "arguments": {...}}</tool_call> form of Hermes and Qwen models.

Only the text of an Action is ever read, so that what users and tools write can spell a call without making one. Detection is
by text, never by ids, since a marker's last character may be merged with what follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
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
    answer = text.rsplit(REASONING_END, 1)[-1]
    return [_call(block.group(1), is_closed=bool(block.group(2))) for block in BLOCK.finditer(answer)]


def _call(raw: str, *, is_closed: bool) -> ToolCall:
    if not is_closed:
        return ToolCall(name="", raw=raw, problem="the call is not closed by </tool_call>")
    try:
        said = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_once_each)
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


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
