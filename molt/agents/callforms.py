"""Forms in which open models write tool calls: how each is read, from its opening marker to the end of the call.

tags    <function=NAME><parameter=KEY>VALUE</parameter></function>, in <tool_call> or not    Qwen3-Coder, Qwen 3.5 on, Nemotron 3, Seed-OSS
        <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>         GLM 4.5 on
        <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>, any prefix      MiniMax M2, DeepSeek 3.2 on
JSON    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                             Hermes, Qwen 2.5 and 3, Granite 4
        NAME between markers, then {...}                                DeepSeek 3, Kimi K2, Mistral, gpt-oss, Llama 3.1
        [{"name": NAME, "arguments": {...}}] after a marker             Mistral, Granite 3, Phi-4-mini
        {"name": NAME, "parameters": {...}}, the whole answer           Llama 3
others  [NAME(KEY=VALUE)] in Python's words                             LFM2
        call:NAME{KEY:VALUE}, strings between <|"|>                     Gemma 4

A call that is not written so is a call with a problem. Tags do not say of which type a value is: the schema of the tool does, else it
stays the text that was written.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from molt.agents.callvalues import PYTHON_WORDS, end_of_json, read_json, typed

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the name of the tool."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The calls behind one opening marker."""

    calls: Sequence[ToolCall]
    start: int
    """Where the opening marker begins, in characters."""
    end: int
    """Where what follows the calls begins."""
    is_whole: bool = True
    """Whether it was read to its own end: one that was not may be no call at all, where reasoning only mentions a marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Arguments as pairs of tags."""

    opening: re.Pattern[str]
    """Of one argument: its key and, where the form says it, whether the value is a string."""
    value_end: re.Pattern[str]
    """The end of a value: what only looks like one is followed by neither another argument nor the end of the call."""
    closing: re.Pattern[str]
    closing_word: str
    is_on_lines: bool = False
    """The value stands on lines of its own."""

    def read(self, text: str, name: str, start: int, place: int, schemas: Schemas) -> Block:
        """The call whose arguments begin at `place`."""
        said: list[tuple[str, str, str | None]] = []
        position = place
        while (found := self.opening.match(text, position)) is not None and (end := self.value_end.search(text, found.end())) is not None:
            value = text[found.end() : end.start()]
            said.append((found["key"].strip(), value.removesuffix("\n") if self.is_on_lines else value, found.groupdict().get("is_string")))
            position = end.end()
        closed = self.closing.match(text, position)
        if closed is None:
            return _unread(text, start, place, self.closing_word, name=name)
        raw = text[place : closed.start()]
        arguments, problem = _arguments(said, schemas.get(name, {}))
        call = ToolCall(name=name, arguments={} if problem else arguments, raw=raw, problem=problem)
        return Block(calls=[call], start=start, end=closed.end())


def _arguments(said: Iterable[tuple[str, str, str | None]], schema: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Arguments by name, and the first problem."""
    arguments: dict[str, Any] = {}
    for key, text, is_string in said:
        if key in arguments:
            return {}, f"the argument {key!r} stands twice"
        try:
            arguments[key] = text if is_string == "true" else read_json(text) if is_string == "false" else typed(text, key, schema)
        except ValueError as error:
            return {}, f"the argument {key!r} is {text[:80]!r}: {error}"
    return arguments, None


def _unread(text: str, start: int, place: int, closing: str, *, name: str = "") -> Block:
    """A call that is not written in its form, up to its closing marker or, without one, to the end."""
    end = text.find(closing, place)
    problem = f"the call is not closed by {closing}" if end < 0 else f"what stands before {closing} is no list of arguments"
    end = len(text) if end < 0 else end
    call = ToolCall(name=name, raw=text[place:end], problem=problem)
    return Block(calls=[call], start=start, end=min(len(text), end + len(closing)), is_whole=False)


_FUNCTION = Tags(
    opening=re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?"),
    value_end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    closing=re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
    closing_word="</function>",
    is_on_lines=True,
)
_GLM = Tags(
    opening=re.compile(r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
    closing=re.compile(r"\s*</tool_call>"),
    closing_word="</tool_call>",
)
_INVOKE = Tags(
    opening=re.compile(r'\s*<[\w:｜]*parameter name="(?P<key>[^"\n]+)"(?: string="(?P<is_string>true|false)")?>'),
    value_end=re.compile(r"</[\w:｜]*parameter>(?=\s*(?:<[\w:｜]*parameter name=|</[\w:｜]*invoke>))"),
    closing=re.compile(r"\s*</[\w:｜]*invoke>"),
    closing_word="invoke>",
)
_NAME = re.compile(r"\s*([\w.\-/:]+)\s*(?=<arg_key>|</tool_call>)")
_FUNCTION_NAME = re.compile(r"\s*<function=(?P<name>[\w.\-/:]+)>")


def _tool_call(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    """What stands in <tool_call>: JSON, tags of a function, or a name and its arguments."""
    if (function := _FUNCTION_NAME.match(text, found.end())) is not None:
        return _FUNCTION.read(text, function["name"], found.start(), function.end(), schemas)
    if (name := _NAME.match(text, found.end())) is not None:
        return _GLM.read(text, name[1], found.start(), name.end(), schemas)
    end = _close_of_json(text, found.end(), "</tool_call>")
    is_whole = end is not None
    if end is None:
        end = text.find("</tool_call>", found.end())
    raw = text[found.end() : end] if end >= 0 else text[found.end() :]
    call = _call(raw) if end >= 0 else ToolCall(name="", raw=raw, problem="the call is not closed by </tool_call>")
    return Block(calls=[call], start=found.start(), end=end + len("</tool_call>") if end >= 0 else len(text), is_whole=is_whole)


def _function(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    """<function=NAME> with tags, or with one object of all arguments."""
    if text[found.end() :].lstrip()[:1] == "{":
        return _after_name(text, found, found["function"], "</function>")
    return _FUNCTION.read(text, found["function"], found.start(), found.end(), schemas)


def _invoke(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    return _INVOKE.read(text, found["invoke"], found.start(), found.end(), schemas)


def _close_of_json(text: str, start: int, closing: str) -> int | None:
    """Where the closing marker after a whole JSON value begins, which may spell that marker itself; None without one."""
    end = end_of_json(text, start)
    if end is None:
        return None
    close = text.find(closing, end)
    return close if close >= 0 and not text[end:close].strip() else None


def _call(raw: str) -> ToolCall:
    """A call that is one object."""
    try:
        said = read_json(raw)
    except ValueError as error:
        return ToolCall(name="", raw=raw, problem=f"the call is not JSON: {error}")
    return _call_of(said, raw)


def _call_of(said: Any, raw: str, *, key: str = "arguments") -> ToolCall:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not said["name"]:
        return ToolCall(name="", raw=raw, problem='the call is not an object with a "name"')
    arguments = said.get(key, {})
    call_id = said["id"] if isinstance(said.get("id"), str) else None
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(name=said["name"], call_id=call_id, raw=raw, problem=f'"{key}" is a {kind}, it must be an object')
    return ToolCall(name=said["name"], arguments=arguments, call_id=call_id, raw=raw)


def _after_name(text: str, found: re.Match[str], name: str, closing: str, *, call_id: str | None = None, is_last: bool = False) -> Block:
    """A call whose name stands in the opening, and whose arguments are the object after it. is_last: the end of the text closes it too."""
    place = found.end()
    end = end_of_json(text, place)
    rest = len(text) - len(text[end:].lstrip()) if end is not None else 0
    is_closed = end is not None and (text.startswith(closing, rest) if closing else True)
    if end is None or not (is_closed or (is_last and rest == len(text))):
        return _unread(text, found.start(), place, closing, name=name) if closing else _rest(text, found, name, call_id)
    try:
        said = read_json(text[place:end])
        problem = None if isinstance(said, dict) else f"the arguments are a {type(said).__name__}, they must be an object"
    except ValueError as error:
        said, problem = {}, f"the arguments are not JSON: {error}"
    call = ToolCall(name=name, arguments={} if problem else said, call_id=call_id, raw=text[place:end], problem=problem)
    return Block(calls=[call], start=found.start(), end=rest + len(closing) if is_closed and closing else end)


def _rest(text: str, found: re.Match[str], name: str, call_id: str | None) -> Block:
    call = ToolCall(name=name, call_id=call_id, raw=text[found.end() :], problem="the arguments are not JSON")
    return Block(calls=[call], start=found.start(), end=len(text), is_whole=False)


def _deepseek(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    if found["fenced"] is None:
        return _after_name(text, found, found["deepseek"].strip(), "<｜tool▁call▁end｜>")
    block = _after_name(text, found, found["fenced"].strip(), "```")
    end = re.compile(r"\s*<｜tool▁call▁end｜>").match(text, block.end)
    return block if end is None else Block(calls=block.calls, start=block.start, end=end.end(), is_whole=block.is_whole)


def _kimi(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    return _after_name(text, found, found["kimi"], "<|tool_call_end|>", call_id=found["kimi_id"].strip())


def _harmony(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    return _after_name(text, found, found["harmony"], "<|call|>", is_last=True)


def _mistral(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    if found["mistral"] is None:
        return _list(text, found, schemas)
    return _after_name(text, found, found["mistral"], "", call_id=found["mistral_id"])


def _list(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    """A list of calls; what follows it is no part of it."""
    end = end_of_json(text, found.end())
    raw = text[found.end() : end]
    try:
        said = read_json(raw)
        calls = [_call_of(one, json.dumps(one, ensure_ascii=False)) for one in said] if isinstance(said, list) else [_call_of(said, raw)]
    except ValueError as error:
        calls = [ToolCall(name="", raw=raw, problem=f"the calls are not JSON: {error}")]
    return Block(calls=calls, start=found.start(), end=len(text) if end is None else end, is_whole=end is not None)


class _Words(ast.NodeTransformer):
    """JSON's words as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """true, false and null."""
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


_PYTHON_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?P<end><\|tool_call_end\|>)""", re.DOTALL)


def _pythonic(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    """[NAME(KEY=VALUE, ...), ...]: read as Python's own parser reads it, and nothing is run."""
    closing = "<|tool_call_end|>"
    pieces = _PYTHON_PIECE.finditer(text, found.end()) if text.find(closing, found.end()) >= 0 else iter(())
    if (end := next((piece for piece in pieces if piece["end"]), None)) is not None:
        raw = text[found.end() : end.start()]
        try:
            calls = [_python_call(node, raw) for node in _nodes(raw)]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            calls = []
        if calls:
            return Block(calls=calls, start=found.start(), end=end.end())
    return _unread(text, found.start(), found.end(), closing)


def _nodes(raw: str) -> list[ast.expr]:
    try:
        tree = ast.parse(raw.strip(), mode="eval").body
    except SyntaxError:
        tree = ast.parse(raw.strip().replace("\n", "\\n"), mode="eval").body  # its template writes line breaks in strings as they are
    return list(tree.elts) if isinstance(tree, ast.List) else [tree]


def _python_call(node: ast.expr, raw: str) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call by keywords")
    said = {str(word.arg): ast.literal_eval(_Words().visit(word.value)) for word in node.keywords}
    return ToolCall(name=ast.unparse(node.func), arguments=read_json(json.dumps(said)), raw=raw)


_GEMMA_PIECE = re.compile(r'<\|"\|>(?P<string>.*?)<\|"\|>|(?P<end><tool_call\|>)', re.DOTALL)
_GEMMA_KEY = re.compile(r"(?<=[{,])\s*([^\s:{}\[\],\"]+)\s*:")
_GEMMA_WORD = re.compile(r"(?<=[:,\[])\s*(True|False|None)(?=\s*[,}\]])")


def _gemma(text: str, found: re.Match[str], schemas: Schemas) -> Block:
    """Between strings it is JSON whose keys have no quotes."""
    place, written = found.end() - 1, ""
    for piece in _GEMMA_PIECE.finditer(text, place) if text.find("<tool_call|>", place) >= 0 else ():
        between = _GEMMA_KEY.sub(r'"\1":', text[place : piece.start()])
        written += _GEMMA_WORD.sub(lambda word: PYTHON_WORDS[word[1]], between)
        place = piece.end()
        if piece["end"]:
            raw = text[found.end() - 1 : piece.start()]
            return Block(calls=[_gemma_call(found["gemma"], written, raw)], start=found.start(), end=place)
        written += json.dumps(piece["string"])
    return _unread(text, found.start(), found.end() - 1, "<tool_call|>", name=found["gemma"])


def _gemma_call(name: str, written: str, raw: str) -> ToolCall:
    try:
        return ToolCall(name=name, arguments=read_json(written), raw=raw)
    except ValueError as error:
        return ToolCall(name=name, raw=raw, problem=f"the arguments cannot be read: {error}")


Read = Callable[[str, re.Match[str], Schemas], Block]
FORMS: Sequence[tuple[str, Read]] = (
    (r"<tool_call>", _tool_call),
    (r"<function=(?P<function>[\w.\-/:]+)>", _function),
    (r'<[\w:｜]*invoke name="(?P<invoke>[^"\n]+)">', _invoke),
    (r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<fenced>[^\n<]+)\n```json\n|(?P<deepseek>[^\n<]+)<｜tool▁sep｜>)", _deepseek),
    (r"<\|tool_call_begin\|>(?P<kimi_id>\s*(?:functions\.)?(?P<kimi>[\w.\-]+):\d+\s*)<\|tool_call_argument_begin\|>", _kimi),
    (r"(?<![\w.])to=functions\.(?P<harmony>[\w.\-]+)[^{}\n]{0,80}?<\|message\|>", _harmony),
    (r"\[TOOL_CALLS\](?:\s*(?P<mistral>[\w.\-]+)(?:\[CALL_ID\](?P<mistral_id>\w+))?(?:\[ARGS\])?(?=\s*\{))?", _mistral),
    (r"<\|tool_call\|>", _list),
    (r"<\|tool_call_start\|>", _pythonic),
    (r"<\|tool_call>call:(?P<gemma>[\w.\-]+)\{", _gemma),
)
"""Each form by the pattern of its opening."""


def bare_call(text: str) -> ToolCall | None:
    """The call that a whole answer of Llama 3 is: an object of a name and parameters, and nothing beside it."""
    raw = text.strip().removeprefix("<|python_tag|>").strip()
    if not raw.startswith("{"):
        return None
    try:
        said = read_json(raw)
    except ValueError:
        return None
    if not isinstance(said, dict) or not {"name", "parameters"} <= said.keys() <= {"name", "parameters", "type"}:
        return None
    return _call_of(said, raw, key="parameters")
