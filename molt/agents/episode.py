"""One rollout: an agent and the policy take turns until the agent or a limit ends it.

    agent (Env or run) <--- Action ---- Policy ---- request ids ----> engine
          |                               | Conversation: messages -> ids
          '---- messages ---------------->| SegmentBuilder: ids + log-probs + versions -> segments

The agent runs in a task of its own, watched with rollout.timeout_s. What ends it:

    terminated, agent ............ the agent said so
    max_turns, context ........... a limit of the policy's doing: Env.cut grades it
    timeout ...................... Env.cut grades what was earned; without earnings the rollout failed (agent_timeout)
    failed ....................... raised as AgentError, AgentTimeoutError, EngineError, LineageError, PromptTooLongError: never a reward
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from molt.agents.conversation import CallPrompt, Conversation
from molt.agents.env import Action, AgentRunner, Observation, Result, StopReason
from molt.agents.render import ChatRenderer
from molt.agents.segments import SegmentBuilder
from molt.data.messages import Message
from molt.data.prompts import Prompt
from molt.errors import AgentError, AgentTimeoutError, EngineError, MoltError, PromptTooLongError
from molt.log.rows import Payload, Segment
from molt.rollout.engine import FinishReason, Generation, Sampling

Generate = Callable[[str, Sequence[int], Sampling], Awaitable[Generation]]
"""(request_id, prompt_ids, sampling) -> Generation."""

MAX_CONTINUATIONS = 16
"""Times that one call is taken up again after the engine cut it."""
CLOSE_TIMEOUT_S = 10.0
"""Longest wait for user code to clean up after itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What bounds one rollout."""

    max_turns: int
    max_len: int
    """Longest segment in tokens."""
    timeout_s: float


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
    """Routed experts that the segments name."""
    reward: float | None
    """None: unscorable."""
    outcome: float | None
    stop_reason: StopReason
    n_sampled: int
    num_turns: int
    wall_s: float
    metrics: dict[str, float]


class _LimitReached(BaseException):
    """Leaves the agent's code when a limit of the rollout is reached; no Exception, so that `except Exception` lets it pass."""

    def __init__(self, reason: StopReason) -> None:
        self.reason = reason


class Policy:
    """The policy as one rollout calls it: messages in, Action out; ids, limits and capture inside."""

    def __init__(
        self,
        renderer: ChatRenderer,
        generate: Generate,
        limits: EpisodeLimits,
        sampling: Sampling,
        ids: EpisodeIds,
        *,
        keep_history: bool = False,
    ) -> None:
        self.builder = SegmentBuilder(is_trainable=ids.purpose == "train" and sampling.temperature > 0)
        self.num_turns = 0
        self.is_waiting = False
        """Whether a model call is in flight now."""
        self.last_finish: FinishReason | None = None
        self.first_cause: MoltError | None = None
        """First error of engine, template or capture; it decides, even if the agent's code swallowed it."""
        self.too_long: str | None = None
        """Set when the first prompt leaves no room to sample."""
        self._conversation = Conversation(renderer, keep_history=keep_history)
        self._renderer = renderer
        self._generate = generate
        self._limits = limits
        self._sampling = replace(sampling, stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids})))
        self._ids = ids

    async def generate(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Action:
        """Sample the next assistant message."""
        if self.is_waiting:
            raise AgentError("model.generate was called while a call of the same rollout was in flight; await one before the next")
        if self.num_turns >= self._limits.max_turns:
            raise _LimitReached(StopReason.MAX_TURNS)
        self.is_waiting = True
        try:
            prompt = self._conversation.prompt(messages)
            budget = self._limits.max_len - len(prompt.token_ids)
            if budget <= 0:
                if not self.builder.segments:
                    self.too_long = f"the first prompt has {len(prompt.token_ids)} tokens, data.max_len={self._limits.max_len}"
                raise _LimitReached(StopReason.CONTEXT)
            generation = await self._sample(prompt, min(budget, max_new_tokens or budget, self._sampling.max_new_tokens))
            self.builder.add(prompt, generation, self.num_turns)
        except MoltError as error:
            self.first_cause = self.first_cause or error
            raise
        finally:
            self.is_waiting = False
        turn = self._conversation.add(messages, prompt, generation.token_ids)
        self.num_turns += 1
        self.last_finish = generation.finish_reason
        return Action(text=turn.text, token_ids=generation.token_ids, finish_reason=generation.finish_reason, turn=self.num_turns - 1)

    async def _sample(self, prompt: CallPrompt, budget: int) -> Generation:
        """One call; a call that the engine cut goes on from the tokens it has, within the same budget and the same turn."""
        ids = self._ids
        parts: list[Generation] = []
        prompt_ids = prompt.token_ids.tolist()
        for part_number in range(MAX_CONTINUATIONS):
            num_done = sum(len(part.token_ids) for part in parts)
            request_id = f"{ids.rollout_id}/{self.num_turns}/{part_number}"
            sampling = replace(self._sampling, max_new_tokens=budget - num_done, seed=call_seed(ids.seed, request_id))
            done_ids = [int(token_id) for part in parts for token_id in part.token_ids]
            part = await self._generate(request_id, prompt_ids + done_ids, sampling)
            parts.append(part)
            if part.finish_reason is not FinishReason.ABORT:
                return join_generations(parts)
            if num_done + len(part.token_ids) >= budget:
                return replace(join_generations(parts), finish_reason=FinishReason.LENGTH)
        raise EngineError(f"request {ids.rollout_id}/{self.num_turns} was cut {MAX_CONTINUATIONS} times before it finished")


def call_seed(seed: int, request_id: str) -> int:
    """Seed of one model call: its own for every call of every member, the same in a repeated run. 31 bits."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def join_generations(parts: Sequence[Generation]) -> Generation:
    """One generation out of the parts of a call that was cut and taken up again; routing comes from the last part."""
    if len(parts) == 1:
        return parts[0]
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        kv_versions=np.concatenate([part.kv_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        routed_experts=parts[-1].routed_experts,
    )


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What the agent has said so far; it outlives the agent's task."""

    earned: float | None = None
    outcome: float | None = None
    unscorable: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    last: Result | None = None
    stop_reason: StopReason | None = None

    def take(self, result: Result) -> None:
        """Count one result in."""
        if not isinstance(result, Result):
            raise AgentError(f"step returned {type(result).__name__}; return a Result")
        if result.reward is not None:
            self.earned = (self.earned or 0.0) + float(result.reward)
        if result.outcome is not None:
            self.outcome = float(result.outcome)
        self.unscorable = result.unscorable or self.unscorable
        self.metrics |= {name: float(value) for name, value in result.metrics.items()}
        self.last = result


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
    policy = Policy(renderer, generate, limits, sampling, ids)
    progress = _Progress()
    try:
        await _drive(runner, prompt, policy, progress, limits)
    except MoltError as error:
        raise policy.first_cause or error from error.__cause__
    except Exception as error:
        raise policy.first_cause or AgentError(f"{type(error).__name__}: {error} ({_where(error)})") from error
    if policy.first_cause is not None:
        raise policy.first_cause
    if policy.too_long is not None:
        raise PromptTooLongError(policy.too_long)
    if not policy.builder.segments:
        raise AgentError("the agent ended the rollout without a sampled token; call the model at least once")
    return _finished(prompt, policy, progress, renderer, sampling, ids, started_at)


def _where(error: Exception) -> str:
    """File and line at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"


async def _drive(runner: AgentRunner, prompt: Prompt, policy: Policy, progress: _Progress, limits: EpisodeLimits) -> None:
    """Run the agent's task within its time; grade what a limit cut."""
    env = runner.make_env(prompt)
    try:
        task = asyncio.ensure_future(_turns(env, policy, progress))
        try:
            done, _ = await asyncio.wait({task}, timeout=limits.timeout_s)
        finally:
            if not task.done():
                await _cancel(task)
        if done:
            task.result()
        else:
            progress.stop_reason = StopReason.TIMEOUT
        if progress.stop_reason in (StopReason.MAX_TURNS, StopReason.CONTEXT, StopReason.TIMEOUT) and policy.too_long is None:
            await _grade_cut(env, policy, progress, limits)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(env.close(), CLOSE_TIMEOUT_S)


async def _turns(env, policy: Policy, progress: _Progress) -> None:
    """The loop of an Env."""
    try:
        first = await env.reset()
        messages = list(_checked(first, is_first=True))
        while True:
            action = await policy.generate(messages)
            result = await env.step(action)
            progress.take(result)
            if result.terminated or result.truncated:
                progress.stop_reason = StopReason.TERMINATED if result.terminated else StopReason.AGENT
                return
            messages += [{"role": "assistant", "content": action.text}, *_checked(result.observation, is_first=False)]
    except _LimitReached as limit:
        progress.stop_reason = limit.reason


def _checked(observation: Observation | None, *, is_first: bool) -> tuple[Message, ...]:
    if not isinstance(observation, Observation) or not observation.messages:
        raise AgentError(f"an observation is {observation!r}; give Observation with at least one message")
    allowed = ("system", "developer", "user", "assistant", "tool") if is_first else ("system", "developer", "user", "tool")
    for message in observation.messages:
        if message.get("role") not in allowed or not isinstance(message.get("content"), str):
            raise AgentError(f"an observed message is {message!r}; its role must be one of {', '.join(allowed)}, its content a string")
    if observation.messages[-1]["role"] == "assistant":
        raise AgentError("an observation ends with an assistant message; it must end before the policy speaks")
    return observation.messages


async def _grade_cut(env, policy: Policy, progress: _Progress, limits: EpisodeLimits) -> None:
    """Let the agent grade what a limit cut; a time-out that it does not grade is a failure."""
    reason = progress.stop_reason
    assert reason is not None, "a cut rollout has a reason"
    result = await asyncio.wait_for(env.cut(reason, progress.earned), CLOSE_TIMEOUT_S)
    if result is None:
        where = "a model call" if policy.is_waiting else "the agent's code"
        if reason is StopReason.TIMEOUT:
            raise AgentTimeoutError(f"rollout.timeout_s={limits.timeout_s} was reached in {where}, turn {policy.num_turns}")
        raise AgentError(f"the rollout was cut ({reason}) and the agent did not grade it")
    progress.take(result)


async def _cancel(task: asyncio.Future) -> None:
    """End the agent's task; code that swallows the cancellation is left behind after a while."""
    task.cancel()
    await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)


def _finished(
    prompt: Prompt,
    policy: Policy,
    progress: _Progress,
    renderer: ChatRenderer,
    sampling: Sampling,
    ids: EpisodeIds,
    started_at: float,
) -> Episode:
    assert progress.stop_reason is not None and progress.last is not None, "a finished rollout has a result"
    is_cut = policy.last_finish is FinishReason.LENGTH
    is_terminated = progress.stop_reason is StopReason.TERMINATED
    stop_reason = (
        StopReason.MAX_TOKENS if is_cut and progress.stop_reason in (StopReason.TERMINATED, StopReason.AGENT) else progress.stop_reason
    )
    reward = None if progress.unscorable else progress.earned
    payloads, segments = [], []
    finished_at = time.time()
    for index, draft in enumerate(policy.builder.segments):
        segments.append(
            Segment(
                rollout_id=ids.rollout_id,
                group_id=ids.group_id,
                segment_index=index,
                num_segments=len(policy.builder.segments),
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
                outcome=progress.outcome,
                is_terminated=is_terminated,
                is_truncated=is_cut or not is_terminated,
                stop_reason=str(stop_reason),
                metrics=progress.metrics,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                engine=ids.engine,
                tokenizer_digest=renderer.tokenizer_digest,
                template_digest=renderer.template_digest,
                started_at=started_at,
                finished_at=finished_at,
            )
        )
    return Episode(
        segments=tuple(segments),
        payloads=tuple(payloads),
        reward=reward,
        outcome=progress.outcome,
        stop_reason=stop_reason,
        metrics=progress.metrics,
        n_sampled=policy.builder.num_sampled,
        num_turns=policy.num_turns,
        wall_s=finished_at - started_at,
    )
