"""Tool calls are read from text as written: good ones, none, several, and every way to write one badly."""

from __future__ import annotations

import pytest

from molt.agents.toolcalls import parse_tool_calls


@pytest.mark.parametrize("text", ['<tool_call>{"name": "get"}</tool_call>', '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'])
def test_call_without_arguments_has_none_with_and_without_line_breaks(text: str) -> None:
    (call,) = parse_tool_calls(text)
    assert call.name == "get" and call.arguments == {} and call.problem is None


def test_several_calls_keep_their_order_and_their_quotes() -> None:
    one = '<tool_call>{"name": "say", "arguments": {"text": "a \\"quoted\\" word\\n"}}</tool_call>'
    two = '<tool_call>{"name": "get", "arguments": {"n": [1, 2]}, "id": "get:0"}</tool_call>'
    calls = parse_tool_calls(f"First. {one}\n{two} Done.")
    assert [call.name for call in calls] == ["say", "get"]
    assert calls[0].arguments == {"text": 'a "quoted" word\n'} and calls[1].call_id == "get:0"


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("not json", "not JSON"),
        ('{"name": "f", "arguments": {"a": 1}', "not JSON"),
        ('{"name": "f", "arguments": {"a": 1,}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": "line\nbreak"}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "1e999 is larger"),
        ('{"name": "f", "arguments": {"a": "\\ud83d"}}', "half a character"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "a key stands twice"),
        ("[" * 100_000, "not JSON"),
        ('["f"]', 'not an object with a "name"'),
        ('{"arguments": {}}', 'not an object with a "name"'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '"arguments" is a str'),
        ('{"name": "f", "arguments": null}', '"arguments" is a NoneType'),
    ],
)
def test_badly_written_call_is_named_and_neither_dropped_nor_coerced(inside: str, problem: str) -> None:
    (call,) = parse_tool_calls(f"<tool_call>{inside}</tool_call>")
    assert problem in (call.problem or "") and call.raw == inside and call.arguments == {}


def test_call_that_was_cut_is_a_bad_call() -> None:
    (call,) = parse_tool_calls('<tool_call>{"name": "f"')
    assert call.problem == "the call is not closed by </tool_call>"


def test_calls_in_reasoning_are_thoughts() -> None:
    text = '<think>I could <tool_call>{"name": "rm"}</tool_call></think>\n<tool_call>{"name": "ls"}</tool_call>'
    assert [call.name for call in parse_tool_calls(text)] == ["ls"]


@pytest.mark.parametrize("before", ["", "<think>why</think>\n", '<think>or <tool_call>{"name": "rm"}</tool_call></think>'])
@pytest.mark.parametrize("word", ["</think>", "</tool_call>", "<tool_call>", "</think></tool_call><tool_call>"])
def test_argument_may_spell_the_markers(before: str, word: str) -> None:
    text = f'{before}<tool_call>{{"name": "say", "arguments": {{"text": "{word}"}}}}</tool_call>'
    (call,) = parse_tool_calls(text)
    assert call.arguments == {"text": word} and call.problem is None


def test_marker_that_reasoning_only_mentions_opens_no_call() -> None:
    text = '<think>what is <tool_call>?</think><tool_call>{"name": "ls"}</tool_call>'
    assert [(call.name, call.problem) for call in parse_tool_calls(text)] == [("ls", None)]


def test_plain_answer_has_no_calls() -> None:
    assert parse_tool_calls("The answer is 42.") == []
