"""Tool calls in the text of a model, in whichever of the forms of molt.agents.callforms it wrote them.

Only the text of an Action is ever read, so that what users and tools write can spell a call without making one. Detection is
by text, never by ids, since a marker's last character may be merged with what follows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from molt.agents.callforms import FORMS, Block, Schemas, ToolCall, bare_call

REASONING_END = "</think>"
_OPENING = re.compile("|".join(f"(?P<form{number}>{opening})" for number, (opening, _) in enumerate(FORMS)))


def parse_tool_calls(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
    """The calls in an answer, in order, bad ones included; reasoning is not searched. Nothing is guessed or coerced."""
    start = max(reasoning_end(text, REASONING_END), 0)
    calls = [call for block in _blocks(text, start, schemas or {}) for call in block.calls]
    if not calls and (bare := bare_call(text[start:])) is not None:
        return [bare]
    return calls


def reasoning_end(text: str, marker: str) -> int:
    """Where the closing marker of reasoning ends, -1 without one: the first that no argument of a call spells."""
    calls = [(block.start, block.end) for block in _blocks(text, 0, {}, is_whole_only=True)] if marker in text else []
    close = text.find(marker)
    while close >= 0 and (call := next((end for start, end in calls if start < close < end), None)) is not None:
        close = text.find(marker, call)
    return close + len(marker) if close >= 0 else -1


def _blocks(text: str, position: int, schemas: Schemas, *, is_whole_only: bool = False) -> Iterator[Block]:
    """What stands behind each opening marker; is_whole_only: a marker whose call is not whole is passed over."""
    while (found := _OPENING.search(text, position)) is not None:
        number = next(number for number in range(len(FORMS)) if found[f"form{number}"] is not None)
        block = FORMS[number][1](text, found, schemas)
        if block.is_whole or not is_whole_only:
            yield block
        position = block.end if block.is_whole or not is_whole_only else found.end()
