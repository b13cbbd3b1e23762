"""A rollout worker: one process that runs agents' episodes against engines and hands finished rollouts to the log.

run(task) -> episode: agent <-> engine of the task, call by call -> segments -> one message to the log -> acknowledged -> RolloutDone
whatever goes wrong on the way is a RolloutFailed with its kind; only a log that takes nothing is raised
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from molt.agents.env import AgentRunner
from molt.agents.episode import Episode, EpisodeIds, run_episode
from molt.agents.load import load_agent
from molt.agents.render import ChatRenderer
from molt.agents.tokenizer import Tokenizer
from molt.config import Config
from molt.errors import AgentError, AgentTimeoutError, EngineError, LineageError, LogError, SettingError
from molt.log.producer import Producer
from molt.rollout.engine import Engine, Generation, Sampling
from molt.rollout.tasks import FailureReason, RolloutDone, RolloutFailed, RolloutTask, call_seed, failed_rollout

_MARGIN_S = 20.0
"""Beyond rollout.timeout_s, in which the episode itself says that time is up."""


class CallCounter:
    """The engine as one rollout sees it: a seed for each call, ids of requests, and a count of what was sampled."""

    def __init__(self, engine: Engine, task: RolloutTask, run_seed: int) -> None:
        self._engine = engine
        self._task = task
        self._run_seed = run_seed
        self.num_calls = 0
        self.n_sampled = 0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """One model call with the seed of its place in the rollout."""
        group = self._task.group
        seed = call_seed(self._run_seed, group.group_id, self._task.member, self._task.try_number, self.num_calls)
        self.num_calls += 1
        generation = await self._engine.generate(request_id, prompt_ids, replace(sampling, seed=seed))
        self.n_sampled += len(generation.token_ids)
        return generation


class RolloutWorker:
    """The actor's body."""

    def __init__(self, name: str, config: Config, *, engines: Mapping[str, Engine], sink: Any, model_path: str | None = None) -> None:
        self._config = config
        self._engines = dict(engines)
        self._model_path = model_path or config.actor.model_name_or_path
        self._producer = Producer(sink, f"{name}-{os.getpid()}-{uuid.uuid4().hex[:6]}")
        self._runner: AgentRunner | None = None
        self._renderer: ChatRenderer | None = None
        self._calls: dict[str, CallCounter] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def start(self) -> None:
        """Load agent, tokenizer and template."""
        if self._config.train.agent_path is None or self._model_path is None:
            raise SettingError("train.agent_path and actor.model_name_or_path are needed for rollouts; set both")
        self._runner = load_agent(self._config.train.agent_path).runner()
        tokenizer = Tokenizer.load(self._model_path)
        self._renderer = ChatRenderer(tokenizer, tools=self._runner.tools, template_kwargs=self._runner.template_kwargs)
        await self._runner.start()

    async def run(self, task: RolloutTask, num_tries: int) -> RolloutDone | RolloutFailed:
        """Run one rollout to its durable end. Raises LogError only."""
        begin = time.time()
        calls = CallCounter(self._engines[task.engine], task, self._config.run.seed)
        self._calls[task.rollout_id] = calls
        try:
            episode = await self._limited(task, calls)
            await self._producer.append(segments=episode.segments, payloads=episode.payloads)
        except (AgentTimeoutError, TimeoutError) as error:
            return self._failed(task, num_tries, FailureReason.AGENT_TIMEOUT, error)
        except EngineError as error:
            return self._failed(task, num_tries, FailureReason.ENGINE_ERROR, error)
        except LineageError as error:
            return self._failed(task, num_tries, FailureReason.LINEAGE_ERROR, error)
        except LogError:
            raise
        except asyncio.CancelledError as error:
            return self._failed(task, num_tries, FailureReason.CANCELLED, error)
        except Exception as error:
            return self._failed(task, num_tries, FailureReason.AGENT_ERROR, error)
        finally:
            self._tasks.pop(task.rollout_id, None)
        del self._calls[task.rollout_id]
        return _done(task, episode, time.time() - begin)

    async def _limited(self, task: RolloutTask, calls: CallCounter) -> Episode:
        """The episode within rollout.timeout_s and a margin, as a task that `cancel` can end."""
        running = asyncio.create_task(self._episode(task, calls), name=task.rollout_id)
        self._tasks[task.rollout_id] = running
        return await asyncio.wait_for(running, self._config.rollout.timeout_s + _MARGIN_S)

    async def _episode(self, task: RolloutTask, calls: CallCounter) -> Episode:
        raise AgentError("not joined yet")

    def _failed(self, task: RolloutTask, num_tries: int, reason: FailureReason, error: BaseException) -> RolloutFailed:
        calls = self._calls.pop(task.rollout_id)
        text = f"{type(error).__name__}: {error}"
        return failed_rollout(task, num_tries, reason, text, n_sampled=calls.n_sampled)

    async def cancel(self, rollout_id: str) -> int | None:
        """End a rollout; returns the tokens that it had sampled, None when it does not run here."""
        calls, running = self._calls.get(rollout_id), self._tasks.get(rollout_id)
        if calls is None:
            return None
        if running is not None:
            running.cancel()
        return calls.n_sampled

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
        num_turns=sum(segment.num_turns for segment in segments),
        n_tokens=sum(segment.n_tokens for segment in segments),
        n_sampled=sum(segment.n_sampled for segment in segments),
        reward=segments[0].reward if segments else None,
        version_min=min(versions, default=None),
        is_truncated=any(segment.is_truncated for segment in segments),
        duration_s=duration_s,
    )
