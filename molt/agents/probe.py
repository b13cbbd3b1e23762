"""What a template and a tokenizer really do, measured at start-up: nothing is assumed that was not seen.

Every sequence that the probe renders is a legal one (turns alternate, a result follows a call), so that strict templates answer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from molt.agents.render import ChatRenderer
from molt.agents.template import ReasoningForm, common_length
from molt.agents.tokenizer import Tokenizer
from molt.data.messages import Message
from molt.errors import AgentError, SettingError

SAMPLES = (
    "Hello, world! tabs\tand\nlines\n\n  two blanks",
    "0123456789 +-*/=()[]{}<>\"'`~@#$%^&_|\\;:,.?",
    "äöüß éèê ñ ç å ø",
    "日本語 中文 한국어 العربية עברית हिन्दी",
    "😀 👩‍👩‍👧 🏳️‍🌈",
    "\x01\x1b[0m\x7f",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProbe:
    """What one template was seen to do. Differences are character positions in the render; None: there is none."""

    first_user_difference: int | None
    """Where adding a user turn changes the render of the history before it."""
    first_tool_difference: int | None
    """Where adding a tool result changes the render of the history before it."""
    drops_old_reasoning: bool
    """Whether reasoning of earlier turns is left out once a user turn follows."""
    header_difference: int | None
    """Where a finished assistant turn departs from the generation prompt."""
    takes_system: bool
    takes_tool_results: bool
    """Whether a tool result after a call is rendered, its text included."""
    shows_calls: bool
    """Whether calls of foreign assistant messages are rendered. Sampled calls are carried as ids, whatever the template does."""
    shows_call_ids: bool
    """Whether the ids of calls are part of the prompt."""
    shows_tools: bool
    """Whether definitions of tools reach the prompt."""
    takes_mappings: bool
    """Whether arguments of calls are given as mappings (else as JSON strings); either form of a message is brought to it."""
    has_parts: bool
    """Whether content is given as a list of parts (else as a string)."""
    num_bos: int
    """Begin-of-sequence tokens in a render; ids have as many, whatever the tokenizer adds by itself."""
    turn_end: str | None
    refusals: dict[str, str]
    """What it refused to render, with its own words."""

    def as_dict(self) -> dict[str, Any]:
        """The form for an event."""
        return asdict(self)


def probe_template(renderer: ChatRenderer) -> TemplateProbe:
    """Measure a template."""
    refusals: dict[str, str] = {}

    def render(name: str, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        try:
            return renderer.text(messages, add_generation_prompt=add_generation_prompt)
        except AgentError as error:
            refusals.setdefault(name, str(error.__cause__ or error))
            return None

    user: Message = {"role": "user", "content": "zzquestion"}
    answer: Message = {"role": "assistant", "content": "zzanswer"}
    thought = answer | {"reasoning_content": "zzthought", "thinking": "zzthought"}
    history = render("chat", [user, answer])
    longer = render("chat", [user, answer, user | {"content": "zzagain"}])
    prompt = render("chat", [user], add_generation_prompt=True)
    if history is None or longer is None or prompt is None:
        raise SettingError(
            f"actor.model_name_or_path={renderer.tokenizer.name}, its chat template refuses a plain chat ({refusals['chat']}); use another"
        )
    with_thought = render("reasoning", [user, thought])
    later = render("reasoning", [user, thought, user | {"content": "zzagain"}])
    system = render("system", [{"role": "system", "content": "zzsystem"}, user])
    called = _called(user)
    asked, resulted = render("tool", called[:2]), render("tool", called, add_generation_prompt=True)
    bos = renderer.tokenizer.inner.bos_token
    return TemplateProbe(
        first_user_difference=_difference(history, longer),
        first_tool_difference=None if asked is None or resulted is None else _difference(asked, resulted),
        drops_old_reasoning=renderer.template.reasoning_form is ReasoningForm.CONTENT or not _keeps(with_thought, later),
        header_difference=_difference(prompt, history),
        takes_system=system is not None and "zzsystem" in system,
        takes_tool_results=resulted is not None and "zzresult" in resulted,
        shows_calls=asked is not None and "zzcall" in asked and "zzvalue" in asked,
        shows_call_ids=resulted is not None and "zzid00000" in resulted,
        shows_tools=_shows_tools(renderer, user),
        takes_mappings=renderer.template.takes_mappings,
        has_parts=renderer.template.has_parts,
        num_bos=prompt.count(bos) if bos else 0,
        turn_end=renderer.turn_end,
        refusals=refusals,
    )


def _keeps(first: str | None, later: str | None) -> bool:
    """Whether reasoning that was shown at first is still there later."""
    return first is None or later is None or "zzthought" not in first or "zzthought" in later


def _called(user: Message) -> list[Message]:
    """A question, a call and its result."""
    call = {"type": "function", "id": "zzid00000", "function": {"name": "zzcall", "arguments": {"zzkey": "zzvalue"}}}
    return [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "zzcall", "tool_call_id": "zzid00000", "content": "zzresult"},
    ]


def _shows_tools(renderer: ChatRenderer, user: Message) -> bool:
    """Whether every tool of the renderer is in the render (true for no tools)."""
    try:
        text = renderer.text([user], add_generation_prompt=True)
    except AgentError:
        return False
    return all(tool["function"]["name"] in text for tool in renderer.template.tools)


def _difference(first: str, second: str) -> int | None:
    """Where second stops to begin with first; None when it does begin with it."""
    if second.startswith(first):
        return None
    return next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def lost_characters(tokenizer: Tokenizer, samples: Sequence[str] = SAMPLES) -> str:
    """Characters that do not come back from encode and decode, in the order of the samples."""
    lost = ""
    for sample in samples:
        if tokenizer.decode(tokenizer.encode(sample)) == sample:
            continue
        for character in sample:
            # Alone and in a word: some tokenizers write a blank before a first word.
            is_kept = any(character in tokenizer.decode(tokenizer.encode(text)) for text in (character, f"a{character}a"))
            if not is_kept and character not in lost:
                lost += character
    return lost


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that loses or changes characters: the model would see another prompt than the one written."""
    lost = lost_characters(tokenizer)
    if lost:
        named = ", ".join(f"{character!r} ({unicodedata.name(character, 'unnamed')})" for character in lost[:8])
        raise SettingError(
            f"actor.model_name_or_path={tokenizer.name}, its tokenizer loses {len(lost)} characters that prompts may hold: {named}"
            f"{', ...' if len(lost) > 8 else ''}; use a model with a whole byte alphabet"
        )
    for text in (f"a{sample}a" for sample in SAMPLES):  # inside a word: some tokenizers write a blank before a first one
        said = tokenizer.decode(tokenizer.encode(text))
        if said != text:
            place = common_length(said, text)
            raise SettingError(
                f"actor.model_name_or_path={tokenizer.name}, its tokenizer makes {said[max(0, place - 8) :][:24]!r} of "
                f"{text[max(0, place - 8) :][:24]!r}; use a model whose tokenizer gives back what it was given"
            )


def check_template(renderer: ChatRenderer, probe: TemplateProbe, *, num_tools: int) -> None:
    """Refuse what an agent needs and the template was not seen to do."""
    if num_tools and not probe.shows_tools:
        raise SettingError(
            f"AgentRunner.tools has {num_tools} tools, the chat template of {renderer.tokenizer.name} does not show them; "
            "describe them in a system message and set tools = ()"
        )
