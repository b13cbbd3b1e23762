"""Supervised rows: assistant turns are targets with their end, prompts and tool results never are."""

from __future__ import annotations

import pytest

from molt.agents.render import ChatRenderer
from molt.agents.supervised import supervised_row
from molt.errors import DataError

CHAT = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "<calc>1+2</calc>"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
]


def targets(renderer: ChatRenderer, **options) -> list[str]:
    """Runs of target tokens as texts."""
    row = supervised_row(renderer, CHAT, **options)
    runs: list[list[int]] = [[]]
    for token_id, is_target in zip(row.token_ids, row.is_target_T, strict=True):
        if is_target:
            runs[-1].append(int(token_id))
        elif runs[-1]:
            runs.append([])
    return [renderer.tokenizer.decode(run) for run in runs if run]


def test_every_assistant_turn_is_a_target_with_its_end(renderer: ChatRenderer) -> None:
    assert targets(renderer) == ["<calc>1+2</calc><|end|>", "3<|end|>"]


def test_last_turn_only_leaves_the_others_out(renderer: ChatRenderer) -> None:
    assert targets(renderer, last_turn_only=True) == ["3<|end|>"]


def test_ids_are_those_of_the_whole_render(renderer: ChatRenderer) -> None:
    row = supervised_row(renderer, CHAT)
    assert renderer.tokenizer.decode(row.token_ids) == renderer.text(CHAT, add_generation_prompt=False)
    assert len(row.is_target_T) == len(row.token_ids)


def test_conversation_without_an_answer_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match="no assistant message"):
        supervised_row(renderer, CHAT[:1])
