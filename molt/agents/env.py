"""What an agent author writes: Env with reset and step, and the AgentRunner that a file exports.

    reset ---- Observation ----> model call ---- Action ----> step ---- Result
                                    ^                           |
                                    '------ its observation ----'      until terminated or truncated is said

Three states of a reward are kept apart: a number (0.0 included), absent (no step has given one yet) and unscorable
(the agent says that this rollout cannot be graded). An exception is none of them: it fails the rollout.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, SupportsFloat

import numpy as np

from molt.agents.callforms import ToolCall
from molt.agents.toolcalls import parse_tool_calls
from molt.data.images import Image
from molt.data.messages import ROLES, TURN_KEY, Message, image_part, text_part, texts_of
from molt.data.prompts import Prompt
from molt.errors import AgentError
from molt.rollout.engine import FinishReason

LARGEST = float(np.finfo(np.float32).max)
"""What a reward and an outcome may be: the log keeps them as float32."""


def number_of(value: Any) -> float | None:
    """A number of any library as a float, infinite where it is too large for one; None for what is no single number."""
    try:
        single = value.item() if hasattr(value, "item") else value
        return float(single) if isinstance(single, SupportsFloat) else None
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # several numbers, or none
        return None


class StopReason(StrEnum):
    """What ended a rollout."""

    TERMINATED = "terminated"
    """The agent ended it."""
    MAX_TOKENS = "max_tokens"
    """Its last model call was cut at rollout.max_new_tokens."""
    MAX_TURNS = "max_turns"
    """rollout.max_turns model calls were made."""
    CONTEXT = "context"
    """No room was left below data.max_len."""
    IMAGES = "images"
    """data.max_images was reached, or the policy itself wrote what stands for an image, so that no further one can be told from it."""
    AGENT = "agent"
    """The agent said truncated."""
    TIMEOUT = "timeout"
    """rollout.timeout_s was reached, and what it had earned until then stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool as the chat template shows it to the model."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""

    def definition(self) -> dict[str, Any]:
        """The form that chat templates take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


def content_of(parts: Sequence[str | Image]) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or parts where there is an image among them."""
    if all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [image_part(part) if isinstance(part, Image) else text_part(part) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Messages that come next in the chat: role user, tool or (first only) system. Never role assistant."""

    messages: tuple[Message, ...]

    @classmethod
    def user(cls, *parts: str | Image) -> Observation:
        """One user message of texts and images, in order."""
        return cls(messages=({"role": "user", "content": content_of(parts)},))

    @classmethod
    def tool(cls, *results: str | Image | Sequence[str | Image], call_ids: Sequence[str] = ()) -> Observation:
        """The results of one run of tool calls, in the order of the calls. A result of several parts is a list of texts and images."""
        if call_ids and len(call_ids) != len(results):
            raise AgentError(f"call_ids has {len(call_ids)} entries for {len(results)} results; give one for each, or none")
        ids: Sequence[str | None] = call_ids or [None] * len(results)
        return cls(
            messages=tuple(
                {"role": "tool", "content": content_of((result,) if isinstance(result, str | Image) else result)}
                | ({"tool_call_id": call_id} if call_id else {})
                for result, call_id in zip(results, ids, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One model call, as the agent sees it."""

    text: str
    """A view: the decoded ids without the stop id, other special tokens kept. It is never encoded again."""
    token_ids: np.ndarray
    """(N,) int32: the ids as sampled, the stop id included."""
    finish_reason: FinishReason
    turn: int
    """Model calls before this one."""
    tools: Sequence[Tool] = ()
    """The agent's: they say of which type an argument is, in forms whose text does not."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the text, bad ones with what is wrong with them, in any form of molt.agents.callforms."""
        return parse_tool_calls(self.text, {tool.name: tool.parameters for tool in self.tools})

    @property
    def message(self) -> Message:
        """The assistant message that stands for these ids in later calls."""
        return {"role": "assistant", "content": self.text, TURN_KEY: self.turn}

    @property
    def is_cut(self) -> bool:
        """Whether a length limit ended it."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one step did. terminated and truncated must be said."""

    terminated: bool
    """The task is over."""
    truncated: bool
    """The agent cuts it short of its end."""
    observation: Observation | None = None
    """What the model sees next; needed when neither terminated nor truncated."""
    reward: float | None = None
    """Added to the rewards of earlier steps; None: this step gives none."""
    unscorable: str | None = None
    """Why this rollout cannot be graded; its reward and outcome are then null, whatever earlier steps gave."""
    outcome: float | None = None
    """Unshaped outcome (correct or not) that dynamic filtering looks at; the last one given stands."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report; the last one given under a name stands."""

    def __post_init__(self) -> None:
        for name in ("terminated", "truncated"):
            said = getattr(self, name)
            if not isinstance(said, bool | np.bool_):
                raise AgentError(f"Result({name}={reprlib.repr(said)}), it must be True or False; say which")
            object.__setattr__(self, name, bool(said))
        is_over = self.terminated or self.truncated
        if not is_over and self.observation is None:
            raise AgentError("Result(terminated=False, truncated=False) without an observation; give one, or end the rollout")
        if self.unscorable is not None and not self.unscorable:
            raise AgentError(f"Result(unscorable={self.unscorable!r}), it says nothing; say why in words, or None when it can be graded")
        for name in ("reward", "outcome"):
            value = getattr(self, name)
            if value is None:
                continue
            number = number_of(value)
            if number is None:
                raise AgentError(f"Result({name}={reprlib.repr(value)}), it is a {type(value).__name__}; give one number, or None")
            if not abs(number) <= LARGEST:
                raise AgentError(f"Result({name}={number:g}), it must be finite as a float32; use unscorable=... when it cannot be graded")
            object.__setattr__(self, name, number)
        metrics = {}
        for name, value in self.metrics.items():
            number = number_of(value)
            if not isinstance(name, str) or number is None:
                raise AgentError(f"Result(metrics={{{name!r}: {reprlib.repr(value)}}}), metrics are numbers by name")
            metrics[name] = number
        object.__setattr__(self, "metrics", metrics)


class Env:
    """One rollout of one prompt; the framework owns the loop.

    A new instance is made for each rollout. Both methods are async: code that blocks goes through asyncio.to_thread, since
    other rollouts share the loop. An exception or an overrun of rollout.timeout_s fails the rollout.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def reset(self) -> Observation:
        """First messages; by default those of the prompt."""
        return Observation(messages=self.prompt.messages)

    async def step(self, action: Action) -> Result:
        """Take one action of the model."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    async def cut(self, reason: StopReason, earned: float | None) -> Result | None:
        """A limit (not the agent) ends the rollout: the result to end with, or None to fail it.

        earned is the sum of rewards given so far, None when no step gave one. By default what was earned stands; a policy
        that ran out of turns or context without earning gets 0, while a timeout without earnings fails the rollout, since
        nobody knows whose fault it was.
        """
        return graded_cut(reason, earned)

    async def close(self) -> None:
        """Free what reset made. Called once, however the rollout ended."""


class Model(Protocol):
    """The policy, as a loop of the user's own calls it."""

    async def generate(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Action:
        """Sample the next assistant message.

        Messages of role assistant that came from this model (Action.text as content) stand for the ids that were sampled.
        """
        ...


class AgentRunner:
    """What an agent file exports, subclassed under the name AgentRunner. One instance lives in each rollout worker.

    Set env to an Env class; or override run and own the loop.
    """

    env: type[Env] | None = None
    tools: Sequence[Tool] = ()
    """Tools shown by the chat template, the same in every render of a rollout."""
    template_kwargs: Mapping[str, Any] = {}
    """Further arguments of the chat template, the same in every render."""

    async def start(self) -> None:
        """Called once in each worker before its first rollout."""

    async def close(self) -> None:
        """Called once in each worker at its end."""

    keep_history: bool = False
    """Show the policy every token it sampled, even where the template leaves old reasoning out: one segment instead of several."""

    def make_env(self, prompt: Prompt) -> Env:
        """The Env of one rollout."""
        if self.env is None:
            raise AgentError(f"{type(self).__name__} sets no env and overrides neither make_env nor run; do one of them")
        return self.env(prompt)

    @property
    def owns_loop(self) -> bool:
        """Whether run is the user's own."""
        return type(self).run is not AgentRunner.run

    async def run(self, prompt: Prompt, model: Model) -> Result:
        """A loop of the user's own: call model.generate as often as needed, and return the last Result.

        The messages may be rewritten between calls (a summary in place of old turns): a new segment then begins. Limits leave
        this code by an exception that is no Exception; let it pass.
        """
        raise NotImplementedError("AgentRunner.run")

    async def cut(self, prompt: Prompt, reason: StopReason, earned: float | None) -> Result | None:
        """As Env.cut, for agents that own their loop."""
        return graded_cut(reason, earned)


def graded_cut(reason: StopReason, earned: float | None) -> Result | None:
    """The usual grading of a rollout that a limit ended: see Env.cut."""
    if reason is StopReason.TIMEOUT and not earned:
        return None
    return Result(terminated=False, truncated=True, reward=None if earned is not None else 0.0)


def _is_content(content: Any) -> bool:
    """Whether it is a text, or parts that are texts and images."""
    if not isinstance(content, list):
        return isinstance(content, str)
    kinds = {"text": ("text", str), "image": ("image", Image)}
    known = [(part, kinds[part["type"]]) for part in content if isinstance(part, dict) and part.get("type") in kinds]
    return len(known) == len(content) > 0 and all(isinstance(part.get(key), kind) for part, (key, kind) in known)


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse messages that no chat can hold before the policy speaks."""
    if not messages:
        raise AgentError("there are no messages; give at least one")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not _is_content(message.get("content")):
            raise AgentError(
                f"messages[{place}] is {message!r}; it must be an object with a role of {', '.join(sorted(ROLES))} and a text, "
                "or parts of text and Image"
            )
        try:
            "".join(texts_of(message["content"])).encode()
        except UnicodeEncodeError as error:
            raise AgentError(f"messages[{place}] holds half a character ({error}), which no tokenizer can read; replace it") from error
    if messages[-1]["role"] == "assistant":
        raise AgentError("the messages end with an assistant message; they must end before the policy speaks")
