"""Chats as ids: the template renders what people and tools wrote, and the ids of the policy's turns are put in as sampled.

Text of the model is never encoded. A render holds a sentinel word in place of each sampled turn; what stands between the
sentinels is encoded, and the sampled ids take the places of the sentinels:

    render   <|user|>Hi<|end|><|assistant|> SENTINEL0 <|end|><|tool|>42<|end|><|assistant|>
    ids      [     encoded once           ] [sampled] [       encoded: glue + observation  ]

A stop id that was sampled takes the place of the end-of-turn marker that the template writes there, so it stands once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import numpy as np

from molt.agents.env import AgentRunner, Tool
from molt.agents.sentinels import ARGUMENTS, CONTENT, REASONING, Sentinels
from molt.agents.shown import Shown, after_lead, is_shown
from molt.agents.template import ChatTemplate, ReasoningForm, common_length
from molt.agents.tokenizer import Tokenizer
from molt.agents.toolcalls import reasoning_end
from molt.config import DataSettings
from molt.data.images import Image
from molt.data.messages import Message, images_of, texts_of
from molt.data.processor import ImageProcessor, PlacedImage
from molt.errors import AgentError, SettingError
from molt.log.rows import TokenSource
from molt.model_shape import IMAGE_FAMILIES, REFUSED_FAMILIES, model_type


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
    images: tuple[PlacedImage, ...] = ()
    """Images in order, by their place in token_ids, which hold them expanded."""


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


_SOURCES = tuple(TokenSource)
PLAIN_TEMPLATE = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"
"""Contents one after the other: what data.apply_chat_template=false renders."""


class ChatRenderer:
    """One tokenizer, one template, one set of tools: every render of a rollout goes through the same ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        """processor: of a model that takes images."""
        self.tokenizer = tokenizer
        self.processor = processor
        own = None if processor is None else processor.template
        source = template if template is not None else own or tokenizer.template
        if not source:
            raise SettingError(
                f"actor.model_name_or_path={tokenizer.name}, its tokenizer has no chat template; "
                "add chat_template.jinja, or set data.apply_chat_template=false"
            )
        self.tools = tools
        definitions = [tool.definition() for tool in tools]
        self.template = ChatTemplate(tokenizer, source, tools=definitions, arguments=template_kwargs or {})
        ends = {*(tokenizer.id_of(text) for text in self.template.turn_ends[:1]), tokenizer.eos_id, *tokenizer.end_ids}
        self.stop_token_ids = tuple(sorted(end for end in ends if end is not None))
        if not self.stop_token_ids:
            raise SettingError(
                f"actor.model_name_or_path={tokenizer.name}, neither template nor tokenizer names an end-of-turn token; set eos_token"
            )
        # The members of a group share their first prompt.
        self._first_layout = lru_cache(maxsize=256)(self._text_layout)
        self.shown = Shown(self.template)
        """The check that it shows all that it is given."""

    @classmethod
    def for_agent(cls, tokenizer: Tokenizer, runner: AgentRunner | type[AgentRunner], settings: DataSettings) -> ChatRenderer:
        """The renderer of a run: the agent's tools and template arguments, the template of the model or plain text."""
        template = None
        if not settings.apply_chat_template:
            template = (tokenizer.inner.bos_token if tokenizer.adds_bos else "") + PLAIN_TEMPLATE
        processor = ImageProcessor.load(tokenizer.name)
        return cls(tokenizer, template=template, tools=runner.tools, template_kwargs=runner.template_kwargs, processor=processor)

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer files."""
        return self.tokenizer.digest

    @property
    def template_digest(self) -> str:
        """Digest of template, tools and template arguments."""
        return self.template.digest

    @property
    def turn_end(self) -> str | None:
        """Special token with which the template ends the last assistant turn; None when it has none."""
        return self.template.turn_ends[0] if self.template.turn_ends else None

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The template's own render."""
        return self.template.text(messages, add_generation_prompt=add_generation_prompt)

    def turn(self, token_ids: np.ndarray) -> SampledTurn:
        """A sampled turn from its ids."""
        has_stop = len(token_ids) > 0 and int(token_ids[-1]) in self.stop_token_ids
        num_said = len(token_ids) - has_stop
        text = self.tokenizer.decode(token_ids[:num_said])
        reasoning_ids = self._reasoning_ids(token_ids, text, num_said)
        return SampledTurn(token_ids=token_ids, text=text, has_stop=has_stop, reasoning_ids=reasoning_ids)

    def _reasoning_ids(self, token_ids: np.ndarray, text: str, num_said: int) -> int:
        """Leading ids up to the end of the reasoning and the blank lines after it; 0 without reasoning, or when no id ends there."""
        if self.template.reasoning_form is ReasoningForm.NONE:
            return 0
        marker = self.template.reasoning_end
        end = reasoning_end(text, marker)
        is_blank = end < 0 or not any(word.isalnum() for word in re.sub(r"<[^<>]*>", "", text[: end - len(marker)]))
        if is_blank:
            return 0
        low, high = 0, num_said
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.tokenizer.decode(token_ids[:middle])) >= end else (middle + 1, high)
        if self.tokenizer.decode(token_ids[:low]) != text[:end]:
            return 0
        while low < num_said and not self.tokenizer.decode(token_ids[low : low + 1]).strip():
            low += 1
        return low

    def layout(self, messages: Sequence[Message], turns: Mapping[int, SampledTurn], *, add_generation_prompt: bool = True) -> Layout:
        """Render messages with sampled turns at the given places of the list.

        Raises AgentError when the template loses a message, or writes a sampled turn in a way that hides where it ends.
        """
        if not turns and add_generation_prompt and all(type(value) is str for message in messages for value in message.values()):
            return self._first_layout(tuple(tuple(message.items()) for message in messages))
        return self._layout(messages, turns, add_generation_prompt)

    def _text_layout(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> Layout:
        """Messages whose values are all texts, before any turn was sampled."""
        return self._layout([dict(message) for message in messages], {}, True)

    def _layout(self, messages: Sequence[Message], turns: Mapping[int, SampledTurn], add_generation_prompt: bool) -> Layout:
        if self.template.shows_result_ids:
            _check_call_ids(messages, turns)
        if self.processor is None and (num_images := len(images_of(messages))):
            raise AgentError(
                f"the messages hold {num_images} images, and {self.tokenizer.name} is no model whose images are supported "
                f"({no_images(self.tokenizer.name)}); leave them out, or take another model"
            )
        sentinels = Sentinels.apart_from(messages)
        shown = sentinels.stand_ins(messages, {place: turn.reasoning_ids > 0 for place, turn in turns.items()}, self.template)
        text = self.text(shown, add_generation_prompt=add_generation_prompt)
        regions = []
        for place, turn in sorted(turns.items()):
            thought = text.find(sentinels.word(REASONING, place))
            has_reasoning = turn.reasoning_ids > 0 and thought >= 0
            start, end = self._region(shown, place, text, sentinels)
            if has_reasoning:
                start = min(start, thought)
            if has_reasoning or turn.reasoning_ids == 0:
                start = _before_opening(text, start, turn.text, self.template.openings)
            if turn.has_stop:
                end = self.template.turn_end_at(text, end, self.tokenizer.decode(turn.token_ids[-1:]))
            regions.append((start, end, place, 0 if has_reasoning else turn.reasoning_ids))
        leads = self.shown.check(shown, sentinels, turns)
        images = self._shown_images(messages, text)
        sources = self._sources(messages, {place: end for _, end, place, _ in regions}, text, leads)
        gaps, position = [], 0
        for start, end, _, _ in [*regions, (len(text), len(text), -1, 0)]:
            gaps.append(self._piece(text, position, start, sources, images))
            position = end
        return Layout(
            text=text,
            gaps=tuple(gaps),
            turns=tuple(place for _, _, place, _ in regions),
            num_dropped=tuple(dropped for _, _, _, dropped in regions),
        )

    def length(self, messages: Sequence[Message]) -> int:
        """Tokens of a first prompt. Images are measured by their size, so that a whole data set is looked through quickly."""
        images = images_of(messages)
        if self.processor is None or not images:
            return len(self.layout(messages, {}).gaps[0].token_ids)
        text = self.text(messages, add_generation_prompt=True)
        self._shown_images(messages, text)
        return len(self.tokenizer.encode(text)) + sum(self.processor.length(image) - 1 for image in images)

    def _shown_images(self, messages: Sequence[Message], text: str) -> Iterator[Image]:
        """The images of a chat in the order of the render, one for each placeholder in it. Sampled turns are not in the render."""
        if self.processor is None:
            return iter(())
        images = images_of(messages)
        placeholder = self.processor.placeholder
        for place, message in enumerate(messages):
            if any(placeholder in said for said in texts_of(message.get("content"))) and text.count(placeholder) != len(images):
                raise AgentError(f"messages[{place}] spells {placeholder}, which stands for an image; write it another way")
        if text.count(placeholder) != len(images):
            raise AgentError(f"the chat template shows {text.count(placeholder)} of {len(images)} images; use another template")
        return iter(images)

    def _region(self, shown: Sequence[Message], place: int, text: str, sentinels: Sentinels) -> tuple[int, int]:
        """Where the turn at that place stands in the render: from its first word to before its end-of-turn marker."""
        words = [word for word in (sentinels.word(kind, place) for kind in (CONTENT, ARGUMENTS)) if word in text]
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
        if words[0] != sentinels.word(CONTENT, place):
            opening = self.text(shown[:place], add_generation_prompt=True)
            first = alone.index(words[0])
            lead = alone[common_length(opening, alone) : first]
            start -= self._lead_length(text[:start], lead, place, sentinels.word(REASONING, place))
        return start, end + len(closing)

    def _lead_length(self, before: str, lead: str, place: int, thought: str) -> int:
        """Characters of the call that stand before its arguments. What the template writes in the last turn only is no part: an opening,
        and reasoning (the word of which is thought) that it leaves out of earlier turns."""
        if before.endswith(lead):
            return len(lead)
        for opening in self.template.openings:
            rest = lead.lstrip().removeprefix(opening).lstrip()
            if lead.lstrip().startswith(opening) and before.endswith(rest):
                return len(rest)
        rest = lead.rpartition(thought)[2].lstrip().removeprefix(self.template.reasoning_end).lstrip()
        if thought in lead and thought not in before and before.endswith(rest):
            return len(rest)
        raise AgentError(f"the chat template rewrites the start of the call at messages[{place}]; give results as user messages")

    def _sources(
        self, messages: Sequence[Message], turn_ends: Mapping[int, int], text: str, leads: Mapping[int, str]
    ) -> list[tuple[int, int, TokenSource]]:
        """Character ranges of message contents, in order, with who wrote them. turn_ends: where sampled turns end in the render.

        leads: what the template writes before a message; a short content may stand in the template's own words too.
        """
        first_turn = min(turn_ends, default=len(messages))
        ranges, position = [], 0
        for place, message in enumerate(messages):
            if place in turn_ends:
                position = max(position, turn_ends[place])
                continue
            for number, said in enumerate(texts_of(message.get("content"))):
                content = said.strip()
                start = after_lead(text, leads.get(place, ""), said, position) if number == 0 else -1
                if start < 0 and content:
                    start = text.find(content, position)
                if start < 0 and content and content in text:
                    start = text.index(content)
                if start < 0:
                    is_required = content and (place > first_turn or message["role"] in ("user", "tool"))
                    if is_required and not is_shown(content, text):
                        raise AgentError(f"the chat template loses messages[{place}] of role {message['role']}; give it as another role")
                    continue
                position = max(position, start + len(content))
                ranges.append((start, start + len(content), _source(message["role"], is_first=place < first_turn)))
        return sorted(ranges)

    def _piece(self, text: str, start: int, end: int, sources: Sequence[tuple[int, int, TokenSource]], images: Iterator[Image]) -> Piece:
        token_ids, places = self.encode_inside(text, start, end)
        codes = np.full(len(token_ids), _SOURCES.index(TokenSource.TEMPLATE), np.int8)
        for first, last, source in sources:
            low = int(np.searchsorted(places, first))
            if 0 < low < len(places) and places[low] > first:
                low -= 1  # a token that begins in the template's blank and ends in the content is of the content
            codes[low : np.searchsorted(places, last)] = _SOURCES.index(source)
        placed: tuple[PlacedImage, ...] = ()
        if self.processor is not None:
            is_image = token_ids == self.processor.placeholder_id
            token_ids, placed = self.processor.expand(token_ids, list(islice(images, int(is_image.sum()))))
            codes = _with_images(codes, is_image, placed)
        edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)] if len(codes) else []
        runs = tuple((_SOURCES[codes[start]], end - start) for start, end in pairwise(edges))
        return Piece(token_ids=token_ids, sources=runs, images=placed)

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


def no_images(name: str) -> str:
    """Why a model's images are not supported."""
    kind = model_type(name)
    return REFUSED_FAMILIES.get(kind, f"model_type {kind or 'unknown'}; supported: {', '.join(IMAGE_FAMILIES)}")


def _with_images(codes: np.ndarray, is_image: np.ndarray, placed: Sequence[PlacedImage]) -> np.ndarray:
    """Codes of sources of expanded ids: features are of the image, the markers around them glue."""
    counts = np.ones(len(codes), np.int64)
    counts[is_image] = [len(item.expansion.token_ids) for item in placed]
    expanded = np.repeat(codes, counts)
    for item in placed:
        codes_of = np.where(item.expansion.is_feature, _SOURCES.index(TokenSource.IMAGE), _SOURCES.index(TokenSource.TEMPLATE))
        expanded[item.position : item.end] = codes_of
    return expanded


def _check_call_ids(messages: Sequence[Message], turns: Mapping[int, SampledTurn]) -> None:
    """Refuse a result without the id that the model gave its call, where that id is part of the prompt."""
    last = None
    for place, message in enumerate(messages):
        last = turns.get(place) if message["role"] == "assistant" else last
        if message["role"] == "tool" and last is not None and str(message.get("tool_call_id") or "\0") not in last.text:
            raise AgentError(
                f"messages[{place}] answers call {message.get('tool_call_id')!r}, which the model did not write, and this chat template "
                "shows ids of calls; give the id that stands in the model's text: Observation.tool(result, call_ids=[...])"
            )


def _source(role: str, *, is_first: bool) -> TokenSource:
    if role in ("system", "developer"):
        return TokenSource.SYSTEM if is_first else TokenSource.OBSERVATION
    if role == "assistant":
        return TokenSource.HISTORY
    if role == "tool":
        return TokenSource.TOOL
    return TokenSource.USER if is_first else TokenSource.OBSERVATION


def _before_opening(text: str, start: int, said: str, openings: Sequence[str]) -> int:
    """Move the start of a turn before what the template opens it with, when the policy sampled that itself."""
    before = text[:start].rstrip()
    for opening in openings:
        if said.lstrip().startswith(opening) and before.endswith(opening):
            return len(before) - len(opening)
    return start
