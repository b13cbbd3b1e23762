"""Words of our own that stand for sampled turns in a render, so that the template is seen to place them and no text is guessed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molt.agents.template import ChatTemplate, ReasoningForm
from molt.data.messages import Message

CONTENT, REASONING, ARGUMENTS, OTHER = "S", "R", "A", "M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinels:
    """The words of one render: no message holds one of them."""

    salt: str

    @classmethod
    def apart_from(cls, messages: Sequence[Message]) -> Sentinels:
        """Words that none of the messages holds, whoever wrote them."""
        salt = ""
        while any(f"molt{salt}turn" in str(message) for message in messages):
            salt += "x"
        return cls(salt=salt)

    def word(self, kind: str, place: int) -> str:
        """The word for the content, the reasoning or the arguments of the turn at that place, or for a message that is no turn."""
        return f"zq{kind}molt{self.salt}turn{place}qz"

    def stand_ins(self, messages: Sequence[Message], places: Mapping[int, bool], template: ChatTemplate) -> list[Message]:
        """The messages with words in place of sampled turns. places: where they are, and whether they hold reasoning.

        A turn that tool results follow stands in with one call for each result: templates look back at it for header and wrapper.
        """
        return [
            self._turn(messages, place, has_reasoning=places[place], template=template) if place in places else dict(message)
            for place, message in enumerate(messages)
        ]

    def _turn(self, messages: Sequence[Message], place: int, *, has_reasoning: bool, template: ChatTemplate) -> Message:
        turn: Message = {"role": "assistant", "content": self.word(CONTENT, place)}
        if has_reasoning and template.reasoning_form is ReasoningForm.FIELD:
            turn |= {"reasoning_content": self.word(REASONING, place), "thinking": self.word(REASONING, place)}
        if has_reasoning and template.reasoning_form is ReasoningForm.CONTENT:
            turn["content"] = self.word(REASONING, place) + template.reasoning_end + self.word(CONTENT, place)
        results = _results_after(messages, place)
        if not results:
            return turn
        if template.shows_calls:
            # Some templates move what is said beside a call behind its result, so a call stands in alone.
            turn["content"] = ""
        function = {"arguments": {"value": self.word(ARGUMENTS, place)}}
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": result.get("tool_call_id", f"call{number:05d}"),
                "function": {"name": result.get("name", "tool"), **function},
            }
            for number, result in enumerate(results)
        ]
        return turn


def _results_after(messages: Sequence[Message], place: int) -> list[Message]:
    """The run of tool results right after a place."""
    results = []
    for message in messages[place + 1 :]:
        if message["role"] != "tool":
            break
        results.append(message)
    return results
