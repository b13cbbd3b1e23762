"""A chat template as it stands: one render for every use, its message forms found by trying, its end-of-turn markers seen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from molt.agents.tokenizer import Tokenizer
from molt.data.messages import Message
from molt.errors import AgentError, SettingError

PROBE_WORD = "zqprobeqz"
PROBE_THOUGHT = "zqthoughtqz"
DEFAULT_REASONING_END = "</think>"


class ReasoningForm(StrEnum):
    """Where a template looks for the reasoning of an assistant message."""

    FIELD = "field"
    """In a field of its own."""
    CONTENT = "content"
    """In the content, before a closing marker: it leaves out what stands before it."""
    NONE = "none"
    """Nowhere: content is content."""


class ChatTemplate:
    """One template with the tools and arguments that every render of a run gets."""

    def __init__(self, tokenizer: Tokenizer, source: str, *, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.tools = [dict(tool) for tool in tools]
        self.arguments = dict(arguments)
        named = json.dumps([source, self.tools, self.arguments], sort_keys=True, default=str)
        self.digest = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
        """blake2b-128 hex of template, tools and arguments."""
        self.has_parts = False
        """Whether it takes content as a list of parts only."""
        self.takes_mappings = True
        """Whether arguments of calls are given as mappings (else as JSON strings)."""
        self._find_content_form()
        self.shows_calls = self._find_call_form()
        """Whether calls of assistant messages are in the render."""
        self.reasoning_form = ReasoningForm.NONE
        self.reasoning_end = DEFAULT_REASONING_END
        """What ends the reasoning of a turn, blanks aside."""
        self.openings: tuple[str, ...] = ()
        """What it writes between a generation prompt and the first word of a turn (a thinking marker, a channel), blanks aside."""
        self._find_openings()
        self.shows_result_ids = self._finds_result_ids()
        """Whether a tool result shows the id of its call: such ids are the model's own words."""
        self.turn_ends = self._find_turn_ends()
        """Special tokens with which it ends an assistant turn: the last one of a chat, and one that more turns follow."""

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The render. AgentError says what the template refused."""
        try:
            return self.tokenizer.inner.apply_chat_template(
                [self._normal(message) for message in messages],
                tools=self.tools or None,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise AgentError(f"the chat template refuses the roles [{roles}] ({type(error).__name__}: {error})") from error

    def _normal(self, message: Message) -> Message:
        """The message in the forms that this template takes."""
        shown = dict(message)
        content = shown.get("content")
        if self.has_parts and isinstance(content, str):
            shown["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            shown["content"] = [{"type": "image"} if part["type"] == "image" else part for part in content]
        if shown.get("tool_calls"):
            shown["tool_calls"] = [self._normal_call(call) for call in shown["tool_calls"]]
        return shown

    def _normal_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call whose arguments have the form that the template was made for; what is no JSON object goes under "value"."""
        function = dict(call.get("function") or {"name": call.get("name"), "arguments": call.get("arguments")})
        arguments = _parsed(function.get("arguments"))
        function["arguments"] = arguments if self.takes_mappings else json.dumps(arguments, ensure_ascii=False)
        return {"type": "function", **call, "function": function}

    def _find_content_form(self) -> None:
        """Try content as a string, then as parts."""
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE_WORD}]
        problem = "it does not show what the assistant said"
        for has_parts in (False, True):
            self.has_parts = has_parts
            try:
                if PROBE_WORD in self.text(chat, add_generation_prompt=False):
                    return
            except AgentError as error:
                problem = str(error)
        raise SettingError(f"the chat template of {self.tokenizer.name} cannot be used, {problem}; give another chat_template.jinja")

    def _find_call_form(self) -> bool:
        """Try the arguments of a call as a mapping, then as a string. Returns whether the call is shown."""
        call = {"type": "function", "id": "zqid00000", "function": {"name": "zqname", "arguments": {"key": PROBE_WORD}}}
        chat: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for takes_mappings in (True, False):
            self.takes_mappings = takes_mappings
            try:
                return PROBE_WORD in self.text(chat, add_generation_prompt=False)
            except AgentError:
                continue
        self.takes_mappings = True
        return False

    def _finds_result_ids(self) -> bool:
        word = "zqresultid"
        call = {"type": "function", "id": word, "function": {"name": "zqname", "arguments": {"key": PROBE_WORD}}}
        chat: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            asked = self.text(chat, add_generation_prompt=False)
            answered = self.text([*chat, {"role": "tool", "tool_call_id": word, "content": "42"}], add_generation_prompt=False)
        except AgentError:
            return False
        return answered.count(word) > asked.count(word)

    def _find_openings(self) -> None:
        """See how reasoning and answer of a turn begin and end."""
        user: Message = {"role": "user", "content": "Hi"}
        answer: Message = {"role": "assistant", "content": PROBE_WORD}
        prompt = self.text([user], add_generation_prompt=True)
        found = []
        for turn in (answer, answer | {"reasoning_content": PROBE_THOUGHT, "thinking": PROBE_THOUGHT}):
            text = self.text([user, turn], add_generation_prompt=False)
            first, answer_at = text.find(PROBE_THOUGHT), text.rfind(PROBE_WORD)
            if 0 <= first < answer_at:
                self.reasoning_form = ReasoningForm.FIELD
                self.reasoning_end = text[first + len(PROBE_THOUGHT) : answer_at].strip() or DEFAULT_REASONING_END
            found.append(text[common_length(prompt, text) : first if first >= 0 else answer_at].strip())
        if self.reasoning_form is ReasoningForm.NONE:
            turn = answer | {"content": PROBE_THOUGHT + DEFAULT_REASONING_END + PROBE_WORD}
            text = self.text([user, turn, user], add_generation_prompt=False)
            if PROBE_WORD in text and PROBE_THOUGHT not in text:
                self.reasoning_form = ReasoningForm.CONTENT
        self.openings = tuple(sorted({opening for opening in found if opening}, key=len, reverse=True))

    def _find_turn_ends(self) -> tuple[str, ...]:
        user: Message = {"role": "user", "content": "Hi"}
        answer: Message = {"role": "assistant", "content": PROBE_WORD}
        last = self._special_after_word([user, answer])
        if last is None:
            return ()
        earlier = self._special_after_word([user, answer, user])
        return (last,) if earlier in (None, last) else (last, earlier)

    def _special_after_word(self, chat: Sequence[Message]) -> str | None:
        text = self.text(chat, add_generation_prompt=False)
        found = self.special_at(text, text.rindex(PROBE_WORD) + len(PROBE_WORD))
        return found.group() if found else None

    def special_at(self, text: str, start: int) -> re.Match[str] | None:
        """The special token that comes next from start on, blanks aside."""
        pattern = self.tokenizer.special_pattern
        while start < len(text) and text[start].isspace():
            start += 1
        return pattern.match(text, start) if pattern else None

    def turn_end_at(self, text: str, start: int, stop_text: str) -> int:
        """Where the end-of-turn marker at start ends, given the stop token that was sampled; start when there is none.

        The sampled token stands in for the marker, whichever of several end tokens it is. A header of the next turn that
        follows at once is no marker, unless it is what was sampled (templates in which the next header ends the turn).
        """
        position, first = start, None
        while (found := self.special_at(text, position)) is not None:
            if found.group() == stop_text:
                return found.end()
            first = first or found
            position = found.end()
        return first.end() if first and first.group() in self.turn_ends else start


def _parsed(arguments: Any) -> dict[str, Any]:
    """Arguments as an object: none is empty, JSON text is read, and what is no object goes under "value"."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {"value": arguments}
    return dict(arguments) if isinstance(arguments, Mapping) else {"value": arguments}


def common_length(first: str, second: str) -> int:
    """Number of leading characters that two texts share."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
