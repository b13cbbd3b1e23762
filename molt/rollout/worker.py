"""A rollout worker: one process that runs agents' episodes against engines and hands finished rollouts to the log.

meet(engine) -> tasks name it
run(task) -> episode: agent <-> engine of the task, call by call -> segments -> one message to the log -> acknowledged -> RolloutDone
whatever goes wrong on the way is a RolloutFailed with its kind; only a log that takes nothing is raised
cancel(rollout) ends the episode; a rollout that is already on its way into the log ends as done
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molt.agents.env import AgentRunner
from molt.agents.episode import Episode, EpisodeIds, EpisodeLimits, run_episode
from molt.agents.load import load_agent
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.data.images import Image
from molt.errors import AgentTimeoutError, EngineError, LineageError, LogError, PromptTooLongError, SettingError
from molt.log.producer import Producer
from molt.log.rows import event
from molt.rollout.carried import from_bytes, to_bytes
from molt.rollout.engine import Engine, Generation, Sampling
from molt.rollout.outbox import Outbox
from molt.rollout.standstill import LoopWatch, Standstill
from molt.rollout.tasks import FailureReason, RolloutDone, RolloutFailed, RolloutTask, failed_rollout

_MARGIN_S = 30.0
"""Beyond rollout.timeout_s, in which the episode itself says that time is up and closes what it opened."""
_CANCEL_LIMIT_S = 20.0
_CUT_LIMIT_S = 5.0
"""For an engine to say what a call that was cut has sampled."""
_LOOK_S = 1.0
"""Longest turn of the loop that is none of an agent's that holds it."""
_REASONS = (
    (AgentTimeoutError, FailureReason.AGENT_TIMEOUT),
    (EngineError, FailureReason.ENGINE_ERROR),
    (LineageError, FailureReason.LINEAGE_ERROR),
    (PromptTooLongError, FailureReason.PROMPT_TOO_LONG),
)


class CountedCalls:
    """The engine as one rollout sees it. A call that nobody waits for any more is cut, and what it sampled is counted too."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, asyncio.Task[Generation]] = {}
        self._cuts: dict[str, asyncio.Task[None]] = {}
        self.n_sampled = 0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """One model call."""
        call = asyncio.create_task(self._engine.generate(request_id, prompt_ids, sampling, images), name=request_id)
        self._open[request_id] = call
        call.add_done_callback(lambda ended: self._count(request_id, ended))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._cut(request_id)
            raise

    def _count(self, request_id: str, ended: asyncio.Task[Generation]) -> None:
        del self._open[request_id]
        if ended.cancelled():
            return
        error = ended.exception()
        self.n_sampled += len(ended.result().token_ids) if error is None else error.n_sampled if isinstance(error, EngineError) else 0

    def _cut(self, request_id: str) -> None:
        if request_id in self._open and request_id not in self._cuts:
            self._cuts[request_id] = asyncio.create_task(self._engine.abort(request_id), name=f"cut {request_id}")

    async def close(self) -> None:
        """Cut what is still open and wait for what it sampled; an engine that does not say so in time leaves it uncounted."""
        for request_id in self._open:
            self._cut(request_id)
        if left := {*self._open.values(), *self._cuts.values()}:
            _, late = await asyncio.wait(left, timeout=_CUT_LIMIT_S)
            for call in late:
                call.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class RolloutWorker:
    """The actor's body."""

    def __init__(self, name: str, config: Config, *, sink: Any, model_path: str | None = None) -> None:
        self._config = config
        self._engines: dict[str, Engine] = {}
        self._model_path = model_path or config.actor.model_name_or_path
        self._outbox = Outbox(Producer(sink, name))
        self._runner: AgentRunner | None = None
        self._renderer: ChatRenderer | None = None
        self._episodes: dict[str, asyncio.Task[Episode]] = {}
        self._ended: dict[str, asyncio.Future[RolloutDone | RolloutFailed]] = {}
        self._watch: LoopWatch | None = None
        self._answered: dict[str, RolloutDone | RolloutFailed] = {}
        """The newest outcomes: a driver that stops waiting may do so while the answer is on its way, and asks again."""

    async def start(self) -> None:
        """Load agent, tokenizer and template."""
        if self._config.train.agent_path is None or self._model_path is None:
            raise SettingError("train.agent_path and actor.model_name_or_path are needed for rollouts; set both")
        self._watch = LoopWatch(str(Path(self._config.train.agent_path).resolve()))
        self._runner = load_agent(self._config.train.agent_path).runner()
        tokenizer = Tokenizer.load(self._model_path)
        self._renderer = ChatRenderer.for_agent(tokenizer, self._runner, self._config.data)
        await self._runner.start()

    async def meet(self, name: str, engine: Engine) -> None:
        """Know an engine by its name, before any task names it."""
        self._engines[name] = engine

    async def watch(self) -> Standstill | None:
        """What holds the loop of this worker, if it does not turn. Ray answers it in a thread of its own (concurrency group watch)."""
        return None if self._watch is None else self._watch.look(_LOOK_S)

    async def call(self, data: bytes) -> bytes:
        """`run` with task and outcome packed."""
        return to_bytes(await self.run(from_bytes(data)))

    async def run(self, task: RolloutTask) -> RolloutDone | RolloutFailed:
        """Run one rollout to its durable end. Raises LogError only."""
        calls = CountedCalls(self._engines[task.engine])
        ended: asyncio.Future[RolloutDone | RolloutFailed] = asyncio.get_running_loop().create_future()
        self._ended[task.rollout_id] = ended
        try:
            outcome = await self._run(task, calls)
        except LogError:
            ended.cancel()
            raise
        except Exception as error:
            reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), FailureReason.AGENT_ERROR)
            text = f"{type(error).__name__}: {error}"
            is_retryable = reason is not FailureReason.PROMPT_TOO_LONG
            outcome = failed_rollout(task, reason, text, n_sampled=calls.n_sampled, is_retryable=is_retryable)
        finally:
            del self._ended[task.rollout_id]
            self._episodes.pop(task.rollout_id, None)
        ended.set_result(outcome)
        self._answered[task.rollout_id] = outcome
        while len(self._answered) > self._config.rollout.max_concurrency:
            del self._answered[next(iter(self._answered))]
        return outcome

    async def _run(self, task: RolloutTask, calls: CountedCalls) -> RolloutDone | RolloutFailed:
        begin = time.monotonic()
        running = asyncio.create_task(self._episode(task, calls), name=task.rollout_id)
        self._episodes[task.rollout_id] = running
        limit_s = self._config.rollout.timeout_s + _MARGIN_S
        await asyncio.wait({running}, timeout=limit_s)
        is_late = not running.done()
        if is_late:
            running.cancel()
        await calls.close()
        if is_late:
            said = f"the episode did not end {_MARGIN_S:g} s after rollout.timeout_s={self._config.rollout.timeout_s:g}"
            return failed_rollout(task, FailureReason.AGENT_TIMEOUT, said, n_sampled=calls.n_sampled)
        if running.cancelled():
            return failed_rollout(task, FailureReason.CANCELLED, "the run stops", n_sampled=calls.n_sampled, is_retryable=False)
        episode = running.result()
        cut = []
        if n_cut := calls.n_sampled - episode.n_sampled:
            cut = [event("calls_cut", rollout_id=task.rollout_id, group_id=task.group.group_id, member=task.member, n_sampled=n_cut)]
        await self._outbox.append(episode.segments, episode.payloads, cut)
        return _done(task, episode, time.monotonic() - begin)

    async def _episode(self, task: RolloutTask, calls: CountedCalls) -> Episode:
        assert self._runner is not None and self._renderer is not None, "start comes before run"
        group, settings = task.group, self._config.rollout
        return await run_episode(
            self._runner,
            group.prompt,
            calls.generate,
            self._renderer,
            limits=EpisodeLimits(
                max_turns=settings.max_turns,
                max_len=self._config.data.max_len,
                timeout_s=settings.timeout_s,
                max_images=self._config.data.max_images,
                max_image_pixels=self._config.data.max_image_pixels,
            ),
            sampling=Sampling(
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature if group.temperature is None else group.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
            ),
            ids=EpisodeIds(
                group_id=group.group_id,
                member=task.member,
                try_number=task.try_number,
                group_size=group.group_size,
                epoch=group.epoch,
                engine=task.engine,
                purpose=group.purpose,
                seed=self._config.run.seed,
            ),
        )

    async def cancel(self, rollout_id: str) -> RolloutDone | RolloutFailed | None:
        """End a rollout and say how it ended; None when it never ran here."""
        ended = self._ended.get(rollout_id)
        if ended is None:
            return self._answered.get(rollout_id)
        if rollout_id in self._episodes:
            self._episodes[rollout_id].cancel()
        return await asyncio.wait_for(asyncio.shield(ended), _CANCEL_LIMIT_S)

    async def stop(self) -> None:
        """Let the agent close what it opened."""
        if self._runner is not None:
            await self._runner.close()


def _done(task: RolloutTask, episode: Episode, duration_s: float) -> RolloutDone:
    segments = episode.segments
    versions = [segment.version_min for segment in segments if segment.version_min is not None]
    return RolloutDone(
        rollout_id=task.rollout_id,
        group_id=task.group.group_id,
        member=task.member,
        engine=task.engine,
        num_segments=len(segments),
        num_turns=episode.num_turns,
        n_tokens=sum(segment.n_tokens for segment in segments),
        n_sampled=sum(segment.n_sampled for segment in segments),
        reward=episode.reward,
        version_min=min(versions, default=None),
        is_truncated=any(segment.is_truncated for segment in segments),
        duration_s=duration_s,
    )
