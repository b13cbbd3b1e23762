"""One rollout: an agent and the policy take turns until the agent or a limit ends it.

    agent (Env or run) <--- Action ---- Policy ---- request ids ----> engine
          |                               | Conversation: messages -> ids
          '---- messages ---------------->| SegmentBuilder: ids + log-probs + versions -> segments

The agent runs in a task of its own, watched with rollout.timeout_s. What ends it:

    terminated, agent ............ the agent said so
    max_turns, context ........... a limit of the policy's doing: cut() grades it
    timeout ...................... cut() grades what was earned; without earnings the rollout failed
    failed ....................... raised as AgentError, AgentTimeoutError, EngineError, LineageError, PromptTooLongError: never a reward
"""

from __future__ import annotations

import asyncio
import sysconfig
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from molt.agents.env import LARGEST, AgentRunner, Env, Observation, Result, StopReason, check_messages
from molt.agents.media import media_payloads, segment_media
from molt.agents.policy import EpisodeLimits, Generate, LimitReached, Policy
from molt.agents.render import ChatRenderer
from molt.agents.routing import routing_payload
from molt.data.messages import Message
from molt.data.prompts import Prompt
from molt.errors import AgentError, AgentTimeoutError, MoltError, PromptTooLongError
from molt.log.rows import Payload, Segment
from molt.rollout.engine import FinishReason, Sampling

T = TypeVar("T")

_NOT_OWN = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<frozen")
"""Where files lie that no agent's author wrote."""
CLOSE_TIMEOUT_S = 10.0
"""Longest wait for user code to grade what was cut, and to clean up after itself."""

__all__ = ["Episode", "EpisodeIds", "EpisodeLimits", "Generate", "run_episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIds:
    """Which rollout it is."""

    group_id: str
    member: int
    try_number: int
    """Tries of this member before this one."""
    group_size: int
    epoch: int
    engine: str
    purpose: str = "train"
    seed: int = 0

    @property
    def rollout_id(self) -> str:
        """Name of the rollout."""
        return f"{self.group_id}/{self.member}/{self.try_number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished rollout: at least one segment."""

    segments: tuple[Segment, ...]
    payloads: tuple[Payload, ...]
    """Routed experts, images and tensors that the segments name, each once."""
    reward: float | None
    """None: unscorable."""
    outcome: float | None
    stop_reason: StopReason
    n_sampled: int
    num_turns: int
    wall_s: float
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What the agent has said so far; it outlives the agent's task."""

    earned: float | None = None
    outcome: float | None = None
    unscorable: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason | None = None

    def take(self, result: Result) -> None:
        """Count one result in."""
        if not isinstance(result, Result):
            raise AgentError(f"the agent returned {type(result).__name__}; return a Result")
        if result.reward is not None:
            self.earned = (self.earned or 0.0) + result.reward
            if abs(self.earned) > LARGEST:
                raise AgentError(f"the rewards of this rollout add up to {self.earned:g}, which is not finite as a float32")
        if result.outcome is not None:
            self.outcome = result.outcome
        self.unscorable = result.unscorable or self.unscorable
        self.metrics |= result.metrics

    def end(self, result: Result) -> None:
        """Count the last result in."""
        self.take(result)
        if not (result.terminated or result.truncated):
            raise AgentError("the agent's last Result says neither terminated nor truncated; say one of them")
        self.stop_reason = StopReason.TERMINATED if result.terminated else StopReason.AGENT


async def run_episode(
    runner: AgentRunner,
    prompt: Prompt,
    generate: Generate,
    renderer: ChatRenderer,
    *,
    limits: EpisodeLimits,
    sampling: Sampling,
    ids: EpisodeIds,
) -> Episode:
    """Run one rollout to its end.

    Raises, when it leaves no usable segment: AgentError (user code raised, or broke the contract), AgentTimeoutError (time
    ran out before anything was earned), EngineError, LineageError, PromptTooLongError. The first cause wins: an engine's error
    that the agent swallowed is still raised. Cancellation passes through after the agent was closed.
    """
    started_at = time.time()
    policy = Policy(
        renderer,
        generate,
        limits=limits,
        sampling=sampling,
        rollout_id=ids.rollout_id,
        seed=ids.seed,
        is_trainable=ids.purpose == "train" and sampling.temperature > 0,
        keep_history=runner.keep_history,
    )
    progress = _Progress()
    try:
        await (_drive_run if runner.owns_loop else _drive_env)(runner, prompt, policy, progress, limits)
    except MoltError as error:
        if policy.first_cause is None:
            raise
        raise policy.first_cause from error
    except Exception as error:
        raise policy.first_cause or AgentError(f"{type(error).__name__}: {error} ({_where(error)})") from error
    if policy.first_cause is not None:
        raise policy.first_cause
    if policy.too_long is not None:
        raise PromptTooLongError(policy.too_long)
    if not policy.builder.segments:
        raise AgentError("the rollout ended without a sampled token; call the model at least once, and leave it room to answer")
    return _finished(prompt, policy, progress, renderer, sampling, ids, started_at)


def _where(error: BaseException) -> str:
    """File and line at which an error was raised; where that is in a library, the newest line of the user's own before it."""
    frames = [(frame.filename, f"{frame.filename}:{frame.lineno}") for frame in traceback.extract_tb(error.__traceback__)]
    if not frames:
        return "unknown place"
    place = frames[-1][1]
    own = next((line for file, line in reversed(frames) if not file.startswith(_NOT_OWN)), place)
    return place if own == place else f"{own}, raised at {place}"


async def _drive_env(runner: AgentRunner, prompt: Prompt, policy: Policy, progress: _Progress, limits: EpisodeLimits) -> None:
    """Run an Env within its time, grade what a limit cut, close it."""

    async def make() -> Env:
        return runner.make_env(prompt)

    env = await _contained(make())
    try:
        await _watched(_env_loop(env, policy, progress), policy, limits)
        if progress.stop_reason is None:
            result = await _limited(env.cut(_cut_by(policy), progress.earned), "Env.cut", policy)
            _take_cut(result, policy, progress, limits)
    except BaseException:
        with suppress(Exception):  # the first cause is told
            await _limited(env.close(), "Env.close", policy)
        raise
    await _limited(env.close(), "Env.close", policy)


async def _drive_run(runner: AgentRunner, prompt: Prompt, policy: Policy, progress: _Progress, limits: EpisodeLimits) -> None:
    """Run an agent that owns its loop within its time, and grade what a limit cut."""

    async def loop() -> None:
        progress.end(await runner.run(prompt, policy))

    await _watched(loop(), policy, limits)
    if progress.stop_reason is None:
        result = await _limited(runner.cut(prompt, _cut_by(policy), progress.earned), "AgentRunner.cut", policy)
        _take_cut(result, policy, progress, limits)


async def _env_loop(env: Env, policy: Policy, progress: _Progress) -> None:
    messages: list[Message] = list(_shown(await env.reset(), is_first=True))
    while True:
        action = await policy.generate(messages)
        result = await env.step(action)
        if isinstance(result, Result) and not (result.terminated or result.truncated):
            progress.take(result)
            messages += [action.message, *_shown(result.observation, is_first=False)]
            continue
        progress.end(result)
        return


def _shown(observation: Observation | None, *, is_first: bool) -> tuple[Message, ...]:
    """The messages of an observation; the policy alone writes assistant messages after the first."""
    if not isinstance(observation, Observation):
        raise AgentError(f"an observation is {type(observation).__name__}; give an Observation")
    check_messages(observation.messages)
    if not is_first and any(message["role"] == "assistant" for message in observation.messages):
        raise AgentError("an observation holds an assistant message; the policy alone writes those")
    return observation.messages


async def _watched(loop: Coroutine[Any, Any, None], policy: Policy, limits: EpisodeLimits) -> None:
    """Await the agent's loop for rollout.timeout_s. Leaves progress.stop_reason None when a limit ended it."""

    async def until_limit() -> None:
        try:
            await loop
        except LimitReached:
            return
        except BaseExceptionGroup as group:  # a TaskGroup of the agent wraps it
            others = group.split(LimitReached)[1]
            if others is not None:
                raise others from group

    task = asyncio.create_task(_contained(until_limit()), name=policy.rollout_id)
    try:
        done, _ = await asyncio.wait({task}, timeout=limits.timeout_s)
        if not done:
            policy.limit, policy.is_late_in_call = StopReason.TIMEOUT, policy.is_waiting
    finally:
        if not task.done():
            # Code that swallows the cancellation is left behind after a while.
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
    if done:
        task.result()


async def _limited(coroutine: Coroutine[Any, Any, T], name: str, policy: Policy) -> T:
    """Await user code that must be quick. Code that swallows the cancellation is left behind."""
    task = asyncio.create_task(_contained(coroutine), name=policy.rollout_id)
    try:
        done, _ = await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
    finally:
        task.cancel()
    if not done:
        raise AgentTimeoutError(f"{name} took longer than {CLOSE_TIMEOUT_S} s")
    return task.result()


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await user code. What it raises beside Exceptions would end the whole worker (sys.exit), or pass for a rollout that was cancelled."""
    try:
        return await coroutine
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise AgentError(f"{type(error).__name__}: {error}, which is no Exception ({_where(error)}); raise one that is") from error


def _cut_by(policy: Policy) -> StopReason:
    assert policy.limit is not None, "a loop without a result was ended by a limit"
    return policy.limit


def _take_cut(result: Result | None, policy: Policy, progress: _Progress, limits: EpisodeLimits) -> None:
    """Count in how the agent graded what was cut; a time-out that it does not grade is a failure."""
    if policy.too_long is not None:
        return
    reason = _cut_by(policy)
    if result is None and reason is StopReason.TIMEOUT:
        where = "a model call" if policy.is_late_in_call else "the agent's code"
        raise AgentTimeoutError(f"rollout.timeout_s={limits.timeout_s} was reached in {where}, after {policy.num_turns} model calls")
    if result is None:
        raise AgentError(f"the rollout was cut ({reason}) and cut() gave no result; return one, with unscorable=... if need be")
    progress.take(result)
    progress.stop_reason = reason


def _finished(
    prompt: Prompt, policy: Policy, progress: _Progress, renderer: ChatRenderer, sampling: Sampling, ids: EpisodeIds, started_at: float
) -> Episode:
    """Segments and payloads of a rollout that ended well."""
    assert progress.stop_reason is not None, "a finished rollout has a reason"
    is_cut = policy.last_finish is FinishReason.LENGTH
    is_terminated = progress.stop_reason is StopReason.TERMINATED
    said_by_agent = progress.stop_reason in (StopReason.TERMINATED, StopReason.AGENT)
    stop_reason = StopReason.MAX_TOKENS if is_cut and said_by_agent else progress.stop_reason
    reward, outcome = (None, None) if progress.unscorable else (progress.earned, progress.outcome)
    drafts = policy.builder.segments
    routes = [routing_payload(draft) for draft in drafts]
    finished_at = time.time()
    segments = [
        Segment(
            rollout_id=ids.rollout_id,
            group_id=ids.group_id,
            segment_index=index,
            num_segments=len(drafts),
            member=ids.member,
            group_size=ids.group_size,
            prompt_id=prompt.prompt_id,
            prompt_index=prompt.prompt_index,
            epoch=ids.epoch,
            purpose=ids.purpose,
            opened_by=draft.opened_by,
            token_ids=draft.token_ids,
            behaviour_logprobs=draft.logprobs,
            spans=tuple(draft.spans),
            reward=reward,
            outcome=outcome,
            is_terminated=is_terminated,
            is_truncated=is_cut or not is_terminated or policy.limit is not None,
            stop_reason=str(stop_reason),
            metrics=progress.metrics,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            engine=ids.engine,
            tokenizer_digest=renderer.tokenizer_digest,
            template_digest=renderer.template_digest,
            routing_digest=payload.payload_digest if payload else None,
            media=segment_media(draft),
            started_at=started_at,
            finished_at=finished_at,
        )
        for index, (draft, payload) in enumerate(zip(drafts, routes, strict=True))
    ]
    payloads = [payload for payload in routes if payload] + media_payloads(drafts)
    return Episode(
        segments=tuple(segments),
        payloads=tuple(payloads),
        reward=reward,
        outcome=outcome,
        stop_reason=stop_reason,
        metrics=progress.metrics,
        n_sampled=policy.builder.num_sampled,
        num_turns=policy.num_turns,
        wall_s=finished_at - started_at,
    )
