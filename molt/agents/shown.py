"""Whether a chat template shows all that it is given: what it leaves out in silence, a policy would have to answer unseen."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from molt.agents.sentinels import OTHER, Sentinels
from molt.agents.template import ChatTemplate
from molt.data.messages import Message
from molt.errors import AgentError

LEAD = 32
"""Characters before a message that tell where it stands."""
MOST_FORMS = 1024
"""Forms that are remembered: chats with parallel calls may have a new one in every turn."""


class Shown:
    """The check for one template. Each form of a chat is tried once, with words of our own in place of its texts."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._leads: dict[tuple[tuple[Any, ...], ...], dict[int, str | None]] = {}
        """By the form of a chat: what the template writes before each message; None for one that it leaves out."""

    def check(self, messages: Sequence[Message], sentinels: Sentinels, sampled: Collection[int] = ()) -> dict[int, str]:
        """What the template writes right before each message, by its place. sampled: places of the policy's turns.

        AgentError when it leaves out a message, or a call that the policy did not sample.
        """
        keys = ("tool_calls", "reasoning_content", "tool_call_id", "name")
        form = tuple((m["role"], type(m["content"]), *(bool(m.get(key)) for key in keys)) for m in messages)
        if form not in self._leads:
            if len(self._leads) >= MOST_FORMS:
                del self._leads[next(iter(self._leads))]
            self._leads[form] = self._leads_of(messages, sentinels)
        leads = self._leads[form]
        place = next((place for place, lead in leads.items() if lead is None), None)
        if place is not None:
            raise AgentError(f"the chat template loses messages[{place}] of role {messages[place]['role']}; give it as another role")
        calls = [place for place, message in enumerate(messages) if message.get("tool_calls") and place not in sampled]
        if calls and not self._template.shows_calls:
            raise AgentError(f"the chat template loses the calls of messages[{calls[0]}]; write them into its content")
        return {place: lead for place, lead in leads.items() if lead}

    def _leads_of(self, messages: Sequence[Message], sentinels: Sentinels) -> dict[int, str | None]:
        """See check. A template that refuses words tells nothing."""
        words = {place: sentinels.word(OTHER, place) for place, message in enumerate(messages) if message["role"] != "assistant"}
        chat = [message | {"content": words[place]} if place in words else message for place, message in enumerate(messages)]
        try:
            text = self._template.text(chat, add_generation_prompt=True)
        except AgentError:
            return {}
        leads: dict[int, str | None] = {}
        end = 0
        for place, word in words.items():
            start = text.find(word)
            leads[place] = None if start < 0 else text[max(end, start - LEAD) : start]
            end = max(end, start + len(word))
        return leads


def after_lead(text: str, lead: str, said: str, position: int) -> int:
    """Where the words of a content begin behind what stands before it, from position on; -1 where they are not found so."""
    for content in (said, said.strip()):
        found = text.find(lead + content, max(0, position - len(lead))) if lead and said.strip() else -1
        if found >= 0:
            return found + len(lead) + len(content) - len(content.lstrip())
    return -1


def is_shown(content: str, text: str) -> bool:
    """Whether the words of a content are in the render, though not letter for letter (JSON quoting, trimmed lines)."""
    words = re.findall(r"\w+", content)
    return all(word in text for word in words)
