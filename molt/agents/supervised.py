"""Conversations with known answers as ids and a mask: what supervised steps train on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from molt.agents.env import Tool
from molt.agents.render import ChatRenderer
from molt.agents.sentinels import Sentinels
from molt.data.messages import Message
from molt.errors import AgentError, DataError

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where data sets keep what an assistant message thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRow:
    """One conversation."""

    token_ids: np.ndarray
    """(N,) int32."""
    is_target_T: np.ndarray
    """(N,) bool: tokens of assistant turns, each with its end-of-turn marker."""


def supervised_row(renderer: ChatRenderer, messages: Sequence[Message], *, last_turn_only: bool = False) -> SupervisedRow:
    """Ids of a conversation up to its last assistant turn, cut where a rollout would cut them: each target is encoded on its own.

    DataError where the template leaves out or rewrites what is to be learned, or what it is an answer to.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise DataError("the conversation has no assistant message; there is nothing to learn from it")
    messages = messages[: places[-1] + 1]
    text = renderer.text(messages, add_generation_prompt=False)
    _check_context(renderer, messages[:-1], text)
    ids, masks, position = [], [], 0
    for place in places[-1:] if last_turn_only else places:
        start, end = _turn_range(renderer, messages, place, text)
        _check_turn(messages[place], place, text[start:end])
        for first, last, is_target in ((position, start, False), (start, end, True)):
            part = renderer.encode_inside(text, first, last)[0]
            ids.append(part)
            masks.append(np.full(len(part), is_target))
        position = end
    return SupervisedRow(token_ids=np.concatenate(ids), is_target_T=np.concatenate(masks))


def tools_of(value: Any) -> tuple[Tool, ...]:
    """The tools of a row: a list of definitions, or its JSON text. ValueError says what is wrong with it."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else None
        except orjson.JSONDecodeError as error:
            raise ValueError(f"tools is a text that is not JSON ({error})") from error
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"tools is {type(value).__name__}; it must be a list of definitions")
    tools = []
    for place, item in enumerate(value):
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{place}] has no name; a tool has name, description and parameters")
        known = {key: function[key] for key in ("parameters",) if function.get(key)}
        tools.append(Tool(name=function["name"], description=function.get("description") or "", **known))
    return tuple(tools)


def _turn_range(renderer: ChatRenderer, messages: Sequence[Message], place: int, text: str) -> tuple[int, int]:
    """Where an assistant turn stands in the whole render, its end-of-turn marker included."""
    opening = renderer.text(messages[:place], add_generation_prompt=True)
    closed = renderer.text(messages[: place + 1], add_generation_prompt=False)
    if renderer.turn_end and renderer.turn_end in closed[len(opening) :]:
        closed = closed[: closed.rindex(renderer.turn_end) + len(renderer.turn_end)]
    if not (text.startswith(opening) and text.startswith(closed)):
        if place == len(messages) - 1:
            raise DataError(f"the chat template begins messages[{place}] otherwise than its generation prompt does; use another template")
        raise DataError(
            f"the chat template rewrites messages[{place}] once more messages follow; set sft.last_turn_only=true, or use another template"
        )
    return len(opening), len(closed)


def _check_context(renderer: ChatRenderer, messages: Sequence[Message], text: str) -> None:
    """Refuse a template that leaves out a message or a tool."""
    hidden = [tool["function"]["name"] for tool in renderer.template.tools if tool["function"]["name"] not in text]
    if hidden:
        raise DataError(f"the chat template does not show the tool {hidden[0]!r}; describe tools in a system message")
    try:
        renderer.shown.check(messages, Sentinels.apart_from(messages))
    except AgentError as error:
        raise DataError(str(error)) from error


def _check_turn(message: Message, place: int, said: str) -> None:
    """Refuse a template that leaves out a part of what an assistant turn is to teach."""
    for name, words in _parts(message, f"messages[{place}]"):
        lost = [] if words.strip() in said else [word for word in re.findall(r"\w+", words) if word not in said]
        if lost:
            raise DataError(f"the chat template loses messages[{place}].{name} ({lost[0][:40]!r} is not in its turn); use another template")


def _parts(message: Message, path: str) -> Iterator[tuple[str, str]]:
    """(name, words) of the parts of an assistant message: what it thought, said and called."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield key, message[key]
    yield "content", re.sub(r"</?\w+>", " ", message["content"])
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or call
        yield f"tool_calls[{number}].name", str(function.get("name") or "")
        arguments = function.get("arguments") or {}
        try:
            arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}.tool_calls[{number}].arguments is a text that is not JSON ({error}); mend it") from error
        if not isinstance(arguments, Mapping):
            raise DataError(f"{path}.tool_calls[{number}].arguments is a JSON {type(arguments).__name__}; it must be an object")
        yield f"tool_calls[{number}].arguments", " ".join(_texts(arguments))


def _texts(value: Any) -> Iterator[str]:
    """Keys and texts of nested arguments; numbers are written in more than one way."""
    if isinstance(value, str):
        yield value
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ():
        if isinstance(key, str):
            yield key
        yield from _texts(item)
