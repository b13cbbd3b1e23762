"""Chats as ids: the template renders what people and tools wrote, and the ids of the policy's turns are put in as sampled.

Text of the model is never encoded. A render holds a sentinel word in place of each sampled turn; what stands between the
sentinels is encoded, and the sampled ids take the places of the sentinels:

    render   <|user|>Hi<|end|><|assistant|> SENTINEL0 <|end|><|tool|>42<|end|><|assistant|>
    ids      [     encoded once           ] [sampled] [       encoded: glue + observation  ]

A stop id that was sampled takes the place of the end-of-turn marker that the template writes there, so it stands once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from molt.agents.env import Tool
from molt.agents.tokenizer import Tokenizer
from molt.data.messages import Message
from molt.errors import AgentError, SettingError
from molt.log.rows import TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One assistant turn as the policy sampled it."""

    token_ids: np.ndarray
    """(N,) int32, the stop id included."""
    text: str
    """The view that the agent saw."""
    has_stop: bool
    reasoning_ids: int = 0
    """Leading ids that are reasoning, its closing marker and the blank lines after it included; 0 when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of prompt ids."""

    token_ids: np.ndarray
    """(N,) int32."""
    sources: tuple[tuple[TokenSource, int], ...]
    """Runs (source, length) in order; the lengths sum to N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A render cut at its sampled turns."""

    text: str
    gaps: tuple[Piece, ...]
    """What stands before the first turn, between turns, and after the last: one more than turns."""
    turns: tuple[int, ...]
    """Indices of the sampled turns, in the order of the render."""
    num_dropped: tuple[int, ...]
    """For each turn, leading ids that the template leaves out (old reasoning)."""


class ChatRenderer:
    """One tokenizer, one template, one set of tools: every render of a rollout goes through the same ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template if template is not None else tokenizer.template
        if not self.template:
            raise SettingError(
                f"actor.model_name_or_path={tokenizer.name}, its tokenizer has no chat template; "
                "add chat_template.jinja, or set data.apply_chat_template=false"
            )
        self.tools = [tool.definition() for tool in tools]
        self.template_kwargs = dict(template_kwargs or {})
        named = repr((self.template, self.tools, sorted(self.template_kwargs.items())))
        self.template_digest = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
        self.turn_end = self._find_turn_end()
        """Text of the special token with which the template ends an assistant turn; None when it has none."""
        ends = {self.tokenizer.id_of(self.turn_end) if self.turn_end else None, tokenizer.eos_id, *tokenizer.end_ids}
        self.stop_token_ids = tuple(sorted(end for end in ends if end is not None))
        if not self.stop_token_ids:
            raise SettingError(
                f"actor.model_name_or_path={tokenizer.name}, neither template nor tokenizer names an end-of-turn token; set eos_token"
            )

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer files."""
        return self.tokenizer.digest

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The template's own render."""
        try:
            return self.tokenizer.inner.apply_chat_template(
                list(messages),
                tools=self.tools or None,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise AgentError(f"the chat template refuses the roles [{roles}] ({type(error).__name__}: {error})") from error

    def _find_turn_end(self) -> str | None:
        word = "zqturnqz"
        text = self.text([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}], add_generation_prompt=False)
        if word not in text:
            raise SettingError(f"the chat template of {self.tokenizer.name} does not show what the assistant said; use another template")
        found = self._special_after(text, text.rindex(word) + len(word))
        return found.group() if found else None

    def _special_after(self, text: str, start: int) -> re.Match[str] | None:
        """The special token that follows at start, blanks aside."""
        pattern = self.tokenizer.special_pattern
        while start < len(text) and text[start].isspace():
            start += 1
        return pattern.match(text, start) if pattern else None

    def turn(self, token_ids: np.ndarray) -> SampledTurn:
        """A sampled turn from its ids."""
        has_stop = len(token_ids) > 0 and int(token_ids[-1]) in self.stop_token_ids
        text = self.tokenizer.decode(token_ids[:-1] if has_stop else token_ids)
        return SampledTurn(token_ids=token_ids, text=text, has_stop=has_stop, reasoning_ids=self._reasoning_ids(token_ids, has_stop))

    def _reasoning_ids(self, token_ids: np.ndarray, has_stop: bool) -> int:
        close_id = self.tokenizer.id_of("</think>")
        places = np.flatnonzero(token_ids == close_id) if close_id is not None else np.zeros(0, np.int64)
        if not len(places):
            return 0
        count = int(places[-1]) + 1
        end = len(token_ids) - has_stop
        while count < end and not self.tokenizer.decode(token_ids[count : count + 1]).strip():
            count += 1
        return count

    def layout(self, messages: Sequence[Message], turns: Mapping[int, SampledTurn], *, add_generation_prompt: bool = True) -> Layout:
        """Render messages with sampled turns at the given places of the list.

        Raises AgentError when the template loses a message, or writes a sampled turn in a way that hides where it ends.
        """
        shown = _with_sentinels(messages, turns)
        text = self.text(shown, add_generation_prompt=add_generation_prompt)
        regions = []
        for place, turn in turns.items():
            has_reasoning = turn.reasoning_ids > 0 and _sentinel("R", place) in text
            start, end = self._region(shown, place, text)
            if turn.reasoning_ids > 0 and has_reasoning:
                start = min(start, text.index(_sentinel("R", place)))
                start = _before_opening(text, start, turn.text)
            if turn.has_stop:
                marker = self._special_after(text, end)
                end = marker.end() if marker else end
            regions.append((start, end, place, 0 if has_reasoning else turn.reasoning_ids))
        sources = self._sources(messages, turns, text)
        gaps, position = [], 0
        for start, end, _, _ in [*regions, (len(text), len(text), -1, 0)]:
            gaps.append(self._piece(text, position, start, sources))
            position = end
        return Layout(
            text=text,
            gaps=tuple(gaps),
            turns=tuple(place for _, _, place, _ in regions),
            num_dropped=tuple(dropped for _, _, _, dropped in regions),
        )

    def _region(self, shown: Sequence[Message], place: int, text: str) -> tuple[int, int]:
        """Where the turn at that place stands in the render: from its first word to before its end-of-turn marker."""
        words = [_sentinel(kind, place) for kind in "SA" if _sentinel(kind, place) in text]
        if not words:
            raise AgentError(f"the chat template loses the assistant turn at messages[{place}]; use another template")
        start = min(text.index(word) for word in words)
        end = max(text.rindex(word) + len(word) for word in words)
        if "tool_calls" not in shown[place]:
            return start, end
        alone = self.text(shown[: place + 1], add_generation_prompt=False)
        after = alone[max(alone.rindex(word) + len(word) for word in words) :]
        pattern = self.tokenizer.special_pattern
        marker = list(pattern.finditer(after))[-1:] if pattern else []
        closing = after[: marker[0].start()] if marker else after
        if not text.startswith(closing, end):
            raise AgentError(f"the chat template rewrites the end of the tool call at messages[{place}]; give results as user messages")
        if words[0] != _sentinel("S", place):
            opening = self.text(shown[:place], add_generation_prompt=True)
            first = alone.index(words[0])
            lead = alone[_common_length(opening, alone) : first]
            if not text.endswith(lead, 0, start):
                raise AgentError(
                    f"the chat template rewrites the start of the tool call at messages[{place}]; give results as user messages"
                )
            start -= len(lead)
        return start, end + len(closing)

    def _sources(self, messages: Sequence[Message], turns: Mapping[int, SampledTurn], text: str) -> list[tuple[int, int, TokenSource]]:
        """Character ranges of message contents, in order, with who wrote them."""
        first_turn = min(turns, default=len(messages))
        ranges, position = [], 0
        for place, message in enumerate(messages):
            if place in turns:
                continue
            content = str(message.get("content") or "").strip()
            start = text.find(content, position) if content else -1
            if start < 0 and content and content in text:
                start = text.index(content)
            if start < 0:
                is_required = content and (place > first_turn or message["role"] in ("user", "tool"))
                if is_required and not _is_shown(content, text):
                    raise AgentError(f"the chat template loses messages[{place}] of role {message['role']}; give it as another role")
                continue
            position = max(position, start + len(content))
            ranges.append((start, start + len(content), _source(message["role"], is_first=place < first_turn)))
        return sorted(ranges)

    def _piece(self, text: str, start: int, end: int, sources: Sequence[tuple[int, int, TokenSource]]) -> Piece:
        token_ids, places = self.encode_inside(text, start, end)
        names = np.full(len(token_ids), TokenSource.TEMPLATE, dtype=object)
        for first, last, source in sources:
            names[(places >= first) & (places < last)] = source
        runs: list[tuple[TokenSource, int]] = []
        for name in names:
            if runs and runs[-1][0] == name:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((TokenSource(name), 1))
        return Piece(token_ids=token_ids, sources=tuple(runs))

    def encode_inside(self, text: str, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of text[start:end] as they are inside the render, and the character of the render at which each begins."""
        part = text[start:end]
        anchor = self.turn_end or self.tokenizer.inner.eos_token
        if start == 0 or not anchor or not part:
            token_ids, places = self.tokenizer.encode_with_offsets(part)
            return token_ids, places + start
        # A tokenizer may write a blank before the first word of a text; after a special token it does what the whole render has.
        token_ids, places = self.tokenizer.encode_with_offsets(anchor + part)
        num_anchor = int(np.searchsorted(places, len(anchor)))
        return token_ids[num_anchor:], places[num_anchor:] - len(anchor) + start


def _with_sentinels(messages: Sequence[Message], turns: Mapping[int, SampledTurn]) -> list[Message]:
    """The messages with a word of our own in place of each sampled turn, and one dummy call for each tool result after it."""
    shown: list[Message] = []
    for place, message in enumerate(messages):
        if place not in turns:
            shown.append(dict(message))
            continue
        stand_in: Message = {"role": "assistant", "content": _sentinel("S", place)}
        if turns[place].reasoning_ids:
            stand_in |= {"reasoning_content": _sentinel("R", place), "thinking": _sentinel("R", place)}
        results = []
        for later in messages[place + 1 :]:
            if later["role"] != "tool":
                break
            results.append(later)
        if results:
            stand_in["tool_calls"] = [
                {
                    "type": "function",
                    "id": result.get("tool_call_id", f"call{number:05d}"),
                    "function": {"name": result.get("name", "tool"), "arguments": {"value": _sentinel("A", place)}},
                }
                for number, result in enumerate(results)
            ]
        shown.append(stand_in)
    return shown


def _sentinel(kind: str, place: int) -> str:
    """A word that no template changes and no text holds by chance: S content, R reasoning, A arguments of a call."""
    return f"zq{kind}moltturn{place}qz"


def _source(role: str, *, is_first: bool) -> TokenSource:
    if role in ("system", "developer"):
        return TokenSource.SYSTEM if is_first else TokenSource.OBSERVATION
    if role == "assistant":
        return TokenSource.HISTORY
    if role == "tool":
        return TokenSource.TOOL
    return TokenSource.USER if is_first else TokenSource.OBSERVATION


def _is_shown(content: str, text: str) -> bool:
    """Whether the words of a content are in the render, though not letter for letter (JSON quoting, trimmed lines)."""
    words = re.findall(r"\w+", content)
    return all(word in text for word in words)


def _before_opening(text: str, start: int, turn_text: str) -> int:
    """Move the start of a turn before the <think> that the template writes, when the policy sampled one of its own."""
    if turn_text.lstrip().startswith("<think>"):
        opening = text.rfind("<think>", 0, start)
        if opening >= 0 and not text[opening + len("<think>") : start].strip():
            return opening
    return start


def _common_length(first: str, second: str) -> int:
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
