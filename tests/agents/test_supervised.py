"""Supervised rows: assistant turns are targets with their end, prompts and tool results never are."""

from __future__ import annotations

import json

import pytest

from molt.agents.render import ChatRenderer
from molt.agents.supervised import supervised_row, tools_of
from molt.errors import DataError
from tests.agents.tokenizers_for_tests import byte_tokenizer

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


def test_what_follows_the_last_turn_teaches_nothing(renderer: ChatRenderer) -> None:
    row, longer = supervised_row(renderer, CHAT), supervised_row(renderer, [*CHAT, {"role": "tool", "content": "late"}])
    assert longer.token_ids.tolist() == row.token_ids.tolist() and longer.is_target_T.tolist() == row.is_target_T.tolist()


REWRITES = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['reasoning_content'] and loop.last -%}{{- '<think>' + message['reasoning_content'] + '</think>' -}}{%- endif -%}"
    "{{- message['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def test_last_turn_is_trained_where_the_template_rewrites_earlier_ones() -> None:
    renderer = ChatRenderer(byte_tokenizer(REWRITES, eos="<|im_end|>"))
    thought = {"reasoning_content": "why"}
    chat = [CHAT[0], CHAT[1] | thought, CHAT[0], CHAT[3] | thought]
    with pytest.raises(DataError, match=r"rewrites messages\[1\].*sft.last_turn_only=true"):
        supervised_row(renderer, chat)
    row = supervised_row(renderer, chat, last_turn_only=True)
    assert renderer.tokenizer.decode(row.token_ids[row.is_target_T]) == "<think>why</think>3<|im_end|>"
    assert renderer.tokenizer.decode(row.token_ids).count("why") == 1


CALL = {"type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (3, {"tool_calls": [CALL]}, r"loses messages\[3\].tool_calls\[0\].name \('get'"),
        (
            3,
            {"tool_calls": [{"function": {"name": "3", "arguments": "{"}}]},
            r"messages\[3\].tool_calls\[0\].arguments is a text that is not JSON",
        ),
        (3, {"tool_calls": [{"function": {"name": "3", "arguments": [1]}}]}, r"messages\[3\].tool_calls\[0\].arguments is a JSON list"),
        (1, {"tool_calls": [CALL]}, r"loses the calls of messages\[1\]"),
        (1, {"reasoning_content": "since"}, r"loses messages\[1\].reasoning_content \('since'"),
        (3, {"thinking": "since"}, r"loses messages\[3\].thinking \('since'"),
    ],
)
def test_what_the_template_leaves_out_is_not_trained_without_it(renderer: ChatRenderer, place: int, changes: dict, said: str) -> None:
    with pytest.raises(DataError, match=said):
        supervised_row(renderer, [message | (changes if place == number else {}) for number, message in enumerate(CHAT)])


def test_tools_of_a_row_are_shown_or_refused(renderer: ChatRenderer) -> None:
    definition = {"name": "get", "parameters": {"type": "object"}}
    tools = tools_of([{"type": "function", "function": definition}])
    assert tools == tools_of([definition]) == tools_of(json.dumps([definition])) and tools_of(None) == tools_of("") == ()
    with pytest.raises(DataError, match="does not show the tool 'get'"):
        supervised_row(ChatRenderer(renderer.tokenizer, tools=tools), CHAT)
    for bad, reason in (("{", "not JSON"), ({"name": "get"}, "is dict"), ([{"type": "function"}], r"tools\[0\] has no name")):
        with pytest.raises(ValueError, match=reason):
            tools_of(bad)


def test_conversation_without_an_answer_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match="no assistant message"):
        supervised_row(renderer, CHAT[:1])
