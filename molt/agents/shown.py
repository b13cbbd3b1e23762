"""Whether a chat template shows all that it is given: what it leaves out in silence, a policy would have to answer unseen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from molt.agents.sentinels import OTHER, Sentinels
from molt.agents.template import ChatTemplate
from molt.data.messages import Message
from molt.errors import AgentError


class Shown:
    """The check for one template. Each form of a chat is tried once, with words of our own in place of its texts."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lost: dict[tuple[tuple[Any, ...], ...], int | None] = {}
        """By the form of a chat, the place of a message that the template leaves out of it."""

    def check(self, messages: Sequence[Message], sentinels: Sentinels, sampled: Collection[int] = ()) -> None:
        """AgentError when the template leaves out a message, or a call that the policy did not sample. sampled: places of its turns."""
        keys = ("tool_calls", "reasoning_content", "tool_call_id", "name")
        form = tuple((m["role"], type(m["content"]), *(bool(m.get(key)) for key in keys)) for m in messages)
        if form not in self._lost:
            self._lost[form] = self._lost_place(messages, sentinels)
        place = self._lost[form]
        if place is not None:
            raise AgentError(f"the chat template loses messages[{place}] of role {messages[place]['role']}; give it as another role")
        calls = [place for place, message in enumerate(messages) if message.get("tool_calls") and place not in sampled]
        if calls and not self._template.shows_calls:
            raise AgentError(f"the chat template loses the calls of messages[{calls[0]}]; write them into its content")

    def _lost_place(self, messages: Sequence[Message], sentinels: Sentinels) -> int | None:
        """The first message whose word is not in the render. A template that refuses words tells nothing."""
        words = {place: sentinels.word(OTHER, place) for place, message in enumerate(messages) if message["role"] != "assistant"}
        chat = [message | {"content": words[place]} if place in words else message for place, message in enumerate(messages)]
        try:
            text = self._template.text(chat, add_generation_prompt=True)
        except AgentError:
            return None
        return next((place for place, word in words.items() if word not in text), None)
