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


SCHEMA = {
    "get": {"type": "object", "properties": {"n": {"type": "integer"}, "q": {"type": "string"}, "maybe": {"type": ["string", "null"]}}}
}


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (
            "<tool_call>\n<function=get>\n<parameter=n>\n3\n</parameter>\n<parameter=q>\n3\n</parameter>\n</function>\n</tool_call>",
            "get",
            {"n": 3, "q": "3"},
        ),
        ("So:\n<function=get>\n<parameter=q>\na\n\nb\n</parameter>\n</function>\n</tool_call>", "get", {"q": "a\n\nb"}),
        ("<function=get>\n</function>", "get", {}),
        ('<function=get>{"n": 3}</function>', "get", {"n": 3}),
        ("<tool_call>get\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "get", {"n": 3}),
        ("<tool_call>get</tool_call>", "get", {}),
        (
            '<minimax:tool_call><invoke name="get"><parameter name="n">3</parameter></invoke></minimax:tool_call>',
            "get",
            {"n": 3},
        ),
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="x" string="false">[1]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="q" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            "get",
            {"x": [1], "q": "5"},
        ),
        ('<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"n": 3}<|tool_call_end|>', "get", {"n": 3}),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"n": 3}<｜tool▁call▁end｜>', "get", {"n": 3}),
        ('[TOOL_CALLS][{"name": "get", "arguments": {"n": 3}, "id": "abcdefghi"}]', "get", {"n": 3}),
        ('[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"n": 3}', "get", {"n": 3}),
        ('<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"n": 3}', "get", {"n": 3}),
        ('{"name": "get", "parameters": {"n": 3}}', "get", {"n": 3}),
        ('<|python_tag|>{"type": "function", "name": "get", "parameters": {"n": 3}}', "get", {"n": 3}),
        ('<|tool_call|>[{"name": "get", "arguments": {"n": 3}}]', "get", {"n": 3}),
        (
            "<|tool_call_start|>[get(n=3, q='<|tool_call_end|>', x=[true, None])]<|tool_call_end|>",
            "get",
            {"n": 3, "q": "<|tool_call_end|>", "x": [True, None]},
        ),
        (
            '<|tool_call>call:get{n:3,q:<|"|>{a:<tool_call|>}<|"|>,x:{y:[]}}<tool_call|>',
            "get",
            {"n": 3, "q": "{a:<tool_call|>}", "x": {"y": []}},
        ),
    ],
)
def test_each_form_of_open_models_is_read(text: str, name: str, arguments: dict[str, object]) -> None:
    (call,) = parse_tool_calls(f"<think>get it</think>{text}", SCHEMA)
    assert (call.name, call.arguments, call.problem) == (name, arguments, None)


def test_value_between_tags_has_the_type_of_the_schema_and_is_text_without_one() -> None:
    written = "<function=get><parameter=n>3</parameter><parameter=maybe>null</parameter></function>"
    assert parse_tool_calls(written, SCHEMA)[0].arguments == {"n": 3, "maybe": None}
    assert parse_tool_calls(written)[0].arguments == {"n": "3", "maybe": "null"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<function=get><parameter=n>three</parameter></function>", "must be integer"),
        ("<function=get><parameter=n>true</parameter></function>", "must be integer"),
        ("<function=get><parameter=n>1</parameter><parameter=n>2</parameter></function>", "stands twice"),
        ("<function=get>some words</function>", "no list of arguments"),
        ("<function=get><parameter=n>3</parameter>", "not closed by </function>"),
        ("<tool_call>get\n<arg_key>n</arg_key>3</tool_call>", "no list of arguments"),
        ('<invoke name="get"><parameter name="n">3</invoke>', "no list of arguments"),
        ('[TOOL_CALLS]get[ARGS]{"n": 3', "not JSON"),
        ('[TOOL_CALLS][{"name": "get"', "not JSON"),
        ("<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>[3]<|tool_call_end|>", "must be an object"),
        ("to=functions.get<|message|>{'n': 3}", "not closed by <|call|>"),
        ("<|tool_call_start|>[get(3)]<|tool_call_end|>", "no list of arguments"),
        ("<|tool_call_start|>[get(n=__import__('os').getpid())]<|tool_call_end|>", "no list of arguments"),
        ("<|tool_call>call:get{n:three}<tool_call|>", "cannot be read"),
    ],
)
def test_call_badly_written_in_any_form_is_named(text: str, problem: str) -> None:
    (call,) = parse_tool_calls(text, SCHEMA)
    assert problem in (call.problem or "") and call.arguments == {}


@pytest.mark.parametrize("marker", ["<function=get>", '<invoke name="get">', "[TOOL_CALLS]", "<|tool_call_start|>", "<tool_call>get"])
def test_reasoning_may_mention_the_marker_of_any_form(marker: str) -> None:
    text = f"<think>{marker}?</think><function=ls>\n</function>"
    assert [(call.name, call.problem) for call in parse_tool_calls(text)] == [("ls", None)]


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 36}', '{"parameters": {}}', "[1, 2]", "f(x=1)"])
def test_answer_that_is_json_is_no_call(text: str) -> None:
    assert parse_tool_calls(text) == []
