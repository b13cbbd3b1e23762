"""Conversations with known answers as ids and a mask: what supervised steps train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from molt.agents.render import ChatRenderer
from molt.data.messages import Message
from molt.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRow:
    """One conversation."""

    token_ids: np.ndarray
    """(N,) int32."""
    is_target_T: np.ndarray
    """(N,) bool: tokens of assistant turns, each with its end-of-turn marker."""


def supervised_row(renderer: ChatRenderer, messages: Sequence[Message], *, last_turn_only: bool = False) -> SupervisedRow:
    """Ids of a conversation, cut where a rollout would cut them: each assistant turn is encoded on its own."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise DataError("the conversation has no assistant message; there is nothing to learn from it")
    text = renderer.text(messages, add_generation_prompt=False)
    ids, masks, position = [], [], 0
    for place in places:
        start, end = _turn_range(renderer, messages, place, text)
        is_target = not last_turn_only or place == places[-1]
        for first, last, mask in ((position, start, False), (start, end, is_target)):
            part = renderer.encode_inside(text, first, last)[0]
            ids.append(part)
            masks.append(np.full(len(part), mask))
        position = end
    return SupervisedRow(token_ids=np.concatenate(ids), is_target_T=np.concatenate(masks))


def _turn_range(renderer: ChatRenderer, messages: Sequence[Message], place: int, text: str) -> tuple[int, int]:
    """Where an assistant turn stands in the whole render, its end-of-turn marker included."""
    opening = renderer.text(messages[:place], add_generation_prompt=True)
    closed = renderer.text(messages[: place + 1], add_generation_prompt=False)
    if renderer.turn_end and renderer.turn_end in closed[len(opening) :]:
        closed = closed[: closed.rindex(renderer.turn_end) + len(renderer.turn_end)]
    if not (text.startswith(opening) and text.startswith(closed)):
        raise DataError(
            f"the chat template rewrites messages[{place}] once more messages follow; train the last turn alone, or use another template"
        )
    return len(opening), len(closed)
