"""The chat of one rollout, call by call: which ids the next call gets, and whether they continue the last ones.

messages the same as before + new ones, template appends ........ continues
messages the same, template drops or rewrites old turns ......... new segment, opened by the template
messages changed by the agent (a summary, an edit) .............. new segment, opened by compaction
messages go on from an earlier call ............................. new segment, opened by fork
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from molt.agents.render import ChatRenderer, Layout, Piece, SampledTurn
from molt.data.messages import TURN_KEY, Message
from molt.data.processor import PlacedImage
from molt.errors import AgentError
from molt.log.rows import TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrompt:
    """What the engine is asked to continue."""

    token_ids: np.ndarray
    """(P,) int32."""
    sources: tuple[tuple[TokenSource, int], ...]
    """Runs (source, length) over token_ids. Turns of the policy that are shown again count as history."""
    opened_by: str
    """Why a new segment begins here, should these ids not continue the last ones."""
    images: tuple[PlacedImage, ...] = ()
    """Images in order, by their place in token_ids, which hold them expanded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    messages: tuple[Message, ...]
    """The prompt's messages and the sampled one."""
    token_ids: np.ndarray
    """Prompt ids and sampled ids."""
    prompt: CallPrompt


class Conversation:
    """The calls of one rollout so far."""

    def __init__(self, renderer: ChatRenderer, *, keep_history: bool = False) -> None:
        self.renderer = renderer
        self.keep_history = keep_history
        """Keep every sampled id of an unchanged history, even where the template would leave old reasoning out."""
        self.turns: dict[int, SampledTurn] = {}
        """Sampled turns by the number of their call."""
        self._calls: list[_Call] = []

    def prompt(self, messages: Sequence[Message]) -> CallPrompt:
        """Ids of the next call for these messages."""
        turns = self._match(messages)
        messages = tuple(_bare(message) for message in messages)
        layout = self.renderer.layout(messages, turns)
        whole = self._whole(layout, turns)
        last = self._calls[-1] if self._calls else None
        if last is None:
            return replace(whole, opened_by="start")
        is_same = messages[: len(last.messages)] == last.messages
        known = len(last.token_ids)
        continues = len(whole.token_ids) >= known and np.array_equal(whole.token_ids[:known], last.token_ids)
        is_kept = self.keep_history or not any(layout.num_dropped)
        if is_same and not continues and is_kept:
            whole, continues = _appended(last, layout.gaps[-1], self.turns[max(self.turns)]), True
        if is_same and continues and len(whole.token_ids) == known:
            raise AgentError(
                "the messages after the last turn add no token to the prompt, so the policy would see nothing new; give a text"
            )
        return replace(whole, opened_by="template" if is_same else self._why_changed(messages))

    def add(self, messages: Sequence[Message], prompt: CallPrompt, token_ids: np.ndarray, *, number: int | None = None) -> SampledTurn:
        """Record what was sampled for a prompt. Returns the turn; its text is what the agent sees."""
        turn = self.renderer.turn(token_ids)
        self.turns[max(self.turns, default=-1) + 1 if number is None else number] = turn
        self._calls.append(
            _Call(
                messages=tuple(_bare(message) for message in (*messages, {"role": "assistant", "content": turn.text})),
                token_ids=np.concatenate([prompt.token_ids, token_ids]),
                prompt=prompt,
            )
        )
        return turn

    def _match(self, messages: Sequence[Message]) -> dict[int, SampledTurn]:
        """Which assistant messages are turns that were sampled here: those with a turn's exact text.

        A message that names its turn is that one; its text must still be the turn's, since an edited text was not sampled. The answer
        to the messages of a call is that call's turn, so that an example that reads the same is none. The rest go by order.
        """
        said = {place: message["content"] for place, message in enumerate(messages) if message["role"] == "assistant"}
        bare = tuple(_bare(message) for message in messages)
        found: dict[int, int] = {}
        for (number, turn), call in zip(self.turns.items(), self._calls, strict=True):
            place = len(call.messages) - 1
            if said.get(place) == turn.text and bare[:place] == call.messages[:-1]:
                found[place] = number
        for place, text in said.items():
            named = self.turns.get(messages[place].get(TURN_KEY, -1))
            if named is not None and named.text == text:
                found[place] = messages[place][TURN_KEY]
        known, number = set(found.values()), 0
        for place, text in said.items():
            if place not in found:
                later = [index for index, turn in self.turns.items() if index >= number and index not in known and turn.text == text]
                if later:
                    found[place] = later[0]
            number = max(number, found.get(place, -1) + 1)
        return {place: self.turns[number] for place, number in found.items()}

    def _whole(self, layout: Layout, turns: dict[int, SampledTurn]) -> CallPrompt:
        """The whole render, sampled turns put in as sampled."""
        parts = [layout.gaps[0].token_ids]
        sources = list(layout.gaps[0].sources)
        images = list(layout.gaps[0].images)
        length = len(parts[0])
        for place, dropped, gap in zip(layout.turns, layout.num_dropped, layout.gaps[1:], strict=True):
            ids = turns[place].token_ids[dropped:]
            parts += [ids, gap.token_ids]
            sources += [(TokenSource.HISTORY, len(ids)), *gap.sources]
            images += [image.moved(length + len(ids)) for image in gap.images]
            length += len(ids) + len(gap.token_ids)
        return CallPrompt(token_ids=np.concatenate(parts), sources=tuple(sources), opened_by="", images=tuple(images))

    def _why_changed(self, messages: tuple[Message, ...]) -> str:
        for call in self._calls:
            if messages == call.messages[:-1] or messages[: len(call.messages)] == call.messages:
                return "fork"
        return "compaction"


def _appended(last: _Call, gap: Piece, turn: SampledTurn) -> CallPrompt:
    """The ids of the last call as they are, then the gap that the template writes after the last turn."""
    sources = (*last.prompt.sources, (TokenSource.HISTORY, len(turn.token_ids)), *gap.sources)
    images = (*last.prompt.images, *(image.moved(len(last.token_ids)) for image in gap.images))
    return CallPrompt(token_ids=np.concatenate([last.token_ids, gap.token_ids]), sources=sources, opened_by="", images=images)


def _bare(message: Message) -> Message:
    """The message as templates see it."""
    return {key: value for key, value in message.items() if key != TURN_KEY}
