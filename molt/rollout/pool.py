"""The rollout pool of the driver: prompt groups in flight, until every member is done or has failed for good.

    dispatch(group) --group_dispatched durable--> one task per member --> worker.run(try 0) --> RolloutDone
                                                       |                      `-- RolloutFailed: rollout_failed event, next try
                                                       `-- all members ended --> FinishedGroup in the results
    next(limit)  <- results; an error of the pool itself (log gone, no engine left) is raised there
    refit(source) <- driver; model calls wait or keep their tokens, rollouts go on
    drain -> nothing new starts, what runs may end within a limit, the rest is cancelled with an event

A rollout sticks to one engine. Each wait on a worker is bounded by rollout.timeout_s and a margin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from molt.config import Config
from molt.errors import EngineError, RefitError, StalledError
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import Event, event
from molt.placement import Seat
from molt.rollout.crew import Crew
from molt.rollout.engine import EngineInfo, WeightSource
from molt.rollout.engine_actor import EngineHandle
from molt.rollout.fleet import Fleet, Send
from molt.rollout.spec import engine_specs
from molt.rollout.tasks import (
    FOUND_COLUMNS,
    FailureReason,
    FinishedGroup,
    GroupTask,
    RefitTimes,
    RolloutDone,
    RolloutFailed,
    RolloutTask,
    done_from_rows,
    failed_rollout,
)

_LOG = logging.getLogger(__name__)
_CANCEL_S = 10.0


class RolloutPool:
    """Engines and rollout workers of a run, behind one queue of finished groups."""

    def __init__(
        self,
        config: Config,
        *,
        sink: Any,
        fleet: Fleet | None = None,
        crew: Crew | None = None,
        model_path: str | None = None,
        policy_version: int = 0,
        producer_name: str = "pool",
        seats: Sequence[Seat] = (),
        run_dir: str | Path | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet or Fleet(engine_specs(config, model_path=model_path, policy_version=policy_version, seats=seats))
        self._crew = crew or Crew(config, sink=sink, model_path=model_path)
        self._producer = Producer(sink, producer_name)
        self._sink = sink
        self._run_dir = run_dir
        """Where the log lies, so that a rollout whose worker died on its way back is found there instead of made again."""
        self._results: asyncio.Queue[FinishedGroup | BaseException] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._open: dict[str, set[int]] = {}
        self._is_draining = False

    async def start(self) -> list[EngineInfo]:
        """Start engines, then workers; returns when rollouts can run."""
        infos = await self._fleet.start()
        await self._crew.start()
        return infos

    @property
    def capacity(self) -> int:
        """Groups that fit into the workers beside those in flight."""
        places = self._config.rollout.num_workers * self._config.rollout.max_concurrency
        return max(0, places - self.num_members) // self._config.rollout.n_samples_per_prompt

    @property
    def num_groups(self) -> int:
        """Groups in flight."""
        return len(self._tasks)

    @property
    def num_members(self) -> int:
        """Rollouts in flight."""
        return sum(len(members) for members in self._open.values())

    @property
    def policy_version(self) -> int:
        """Version that the engines serve."""
        return self._fleet.policy_version

    async def dispatch(self, *groups: GroupTask) -> None:
        """Send groups to rollout; returns once their group_dispatched are durable, in one message. A group in flight is refused."""
        for group in groups:
            if group.group_id in self._tasks:
                raise EngineError(f"group {group.group_id} is in flight already; dispatch it once")
            if self._is_draining:
                raise EngineError(f"group {group.group_id} was dispatched while the pool drains; dispatch before drain")
        if groups:
            await self._append(*(self._dispatched(group) for group in groups), is_urgent=True)
        for group in groups:
            self._open[group.group_id] = set(group.members)
            self._tasks[group.group_id] = asyncio.create_task(self._supervise(group), name=f"group {group.group_id}")

    def _dispatched(self, group: GroupTask) -> Event:
        return event(
            "group_dispatched",
            group_id=group.group_id,
            policy_version=self.policy_version,
            epoch=group.epoch,
            order_index=group.order_index,
            prompt_index=group.prompt.prompt_index,
            prompt_id=group.prompt.prompt_id,
            group_size=group.group_size,
            members=list(group.members),
            purpose=group.purpose,
        )

    async def next(self, limit_s: float) -> FinishedGroup:
        """The next finished group, in the order of finishing; StalledError after limit_s."""
        try:
            result = await asyncio.wait_for(self._results.get(), limit_s)
        except TimeoutError as error:
            raise StalledError(f"no group finished within {limit_s:g} s: {self.describe()}") from error
        if isinstance(result, BaseException):
            raise result
        return result

    def ready(self) -> list[FinishedGroup]:
        """Groups that finished and were not fetched yet, without waiting."""
        groups = []
        while not self._results.empty():
            result = self._results.get_nowait()
            if isinstance(result, BaseException):
                raise result
            groups.append(result)
        return groups

    async def results(self, limit_s: float) -> AsyncIterator[FinishedGroup]:
        """Finished groups until none is in flight."""
        while self._tasks or not self._results.empty():
            yield await self.next(limit_s)

    def describe(self) -> str:
        """What is in flight, for a panel or an error."""
        engines = {name: berth.death or ("stale" if berth.is_stale else berth.num_rollouts) for name, berth in self._fleet.berths.items()}
        return f"{len(self._tasks)} groups, {self.num_members} rollouts in flight; rollouts by engine {engines}"

    async def engines(self) -> list[str]:
        """Engines that a refit would reach now; waits for a newcomer when there is none."""
        return await self._fleet.alive()

    @property
    def newcomers(self) -> list[str]:
        """Engines that came in place of others and wait for weights."""
        return self._fleet.newcomers

    async def refit(
        self,
        source: WeightSource,
        *,
        step: int,
        send: Send | None = None,
        only: Sequence[str] | None = None,
        allowed: Callable[[], Awaitable[None]] | None = None,
    ) -> RefitTimes:
        """Give all engines (or only some) new weights, in the middle of calls when train.partial_rollout_enable is set.

        send: what the trainer does while engines receive, for transport nccl. allowed: returns when the new weights may be sampled
        with; engines hold them until then. RefitError when no engine took them: refit_failed is in the log and the old version serves on.
        """
        mode = "keep" if self._config.train.partial_rollout_enable else "wait"
        try:
            times = await self._fleet.refit(source, pause_mode=mode, send=send, only=only, allowed=allowed)
        except RefitError as error:
            await self._tell_refit_failed(source, step, {"all": str(error)})
            raise
        if times.failed:
            await self._tell_refit_failed(source, step, times.failed)
        return times

    async def sleep(self) -> None:
        """Free the engines' GPU memory by vllm.sleep_level while the trainer steps; nothing happens at level 0."""
        if self._config.vllm.sleep_level:
            await self._fleet.sleep(self._config.vllm.sleep_level)

    async def wake(self, *, is_refit_next: bool) -> None:
        """Take it back; with a refit next, calls go on after that."""
        if self._config.vllm.sleep_level:
            await self._fleet.wake(is_refit_next=is_refit_next)

    async def _tell_refit_failed(self, source: WeightSource, step: int, failed: dict[str, str]) -> None:
        told = [
            event("refit_failed", policy_version=source.policy_version, step=step, engine=name, error=text) for name, text in failed.items()
        ]
        await self._append(*told)

    async def drain(self, limit_s: float) -> int:
        """Take nothing new, let what runs end within limit_s, cancel the rest with an event each; returns groups cancelled."""
        self._is_draining = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=limit_s)
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        return len(left)

    def reopen(self) -> None:
        """Take groups again after a drain."""
        self._is_draining = False

    async def stop(self) -> None:
        """Cancel what is left, stop workers and engines."""
        await self.drain(0.0)
        await self._crew.stop()
        await self._fleet.stop()

    # One group, one member.

    async def _supervise(self, group: GroupTask) -> None:
        """Run a group to its end; an error that is no rollout's fault reaches `next`."""
        try:
            ended = await _all_or_first_error([self._run_member(group, member) for member in group.members])
            done = tuple(item for item in ended if isinstance(item, RolloutDone))
            failed = tuple(item for item in ended if isinstance(item, RolloutFailed))
            self._results.put_nowait(FinishedGroup(group=group, done=done, failed=failed))
        except Exception as error:
            self._results.put_nowait(error)
        finally:
            del self._open[group.group_id]
            del self._tasks[group.group_id]

    async def _run_member(self, group: GroupTask, member: int) -> RolloutDone | RolloutFailed:
        num_tries = self._config.rollout.num_tries
        for tried in range(1, num_tries + 1):
            outcome = await self._try_once(group, member, group.first_try + tried - 1)
            is_final = isinstance(outcome, RolloutDone) or tried == num_tries or not outcome.is_retryable
            if isinstance(outcome, RolloutFailed):
                await self._tell_failed(outcome, is_final=is_final)
            if is_final:
                self._open[group.group_id].discard(member)
                return outcome
        raise AssertionError("rollout.num_tries is at least 1")

    async def _try_once(self, group: GroupTask, member: int, try_number: int) -> RolloutDone | RolloutFailed:
        berth = await self._fleet.take_berth()
        task = RolloutTask(group=group, member=member, try_number=try_number, engine=berth.spec.name)
        try:
            outcome = await self._crew.run(task, berth.handle)
        except asyncio.CancelledError:
            ended = await self._crew.cancel(task) or await asyncio.to_thread(self._find, task)
            ended = ended or failed_rollout(task, FailureReason.CANCELLED, "the run stops", is_retryable=False)
            if isinstance(ended, RolloutFailed):
                await self._tell_failed(await _counted(ended, berth.handle), is_final=False)  # a resumed run tries it again
            raise
        finally:
            berth.num_rollouts -= 1
        if isinstance(outcome, RolloutFailed) and outcome.reason is FailureReason.ATTEMPT_LOST:
            outcome = await asyncio.to_thread(self._find, task) or outcome
        if isinstance(outcome, RolloutFailed) and outcome.reason is FailureReason.ENGINE_ERROR:
            is_alive = await self._fleet.examine(task.engine)
            _LOG.warning(
                "rollout %s failed on engine %s (%s): %s", task.rollout_id, task.engine, "alive" if is_alive else "dead", outcome.error
            )
            if not is_alive:
                return outcome  # nobody can say what it sampled
        return await _counted(outcome, berth.handle) if isinstance(outcome, RolloutFailed) else outcome

    def _find(self, task: RolloutTask) -> RolloutDone | None:
        """A rollout that is in the log although its worker is gone."""
        if self._run_dir is None:
            return None
        self._sink.flush()
        rows = LogReader.open(str(self._run_dir)).cut().table("segments", list(FOUND_COLUMNS), where=f"rollout_id = '{task.rollout_id}'")
        return done_from_rows(task, rows.to_pylist())

    async def _tell_failed(self, outcome: RolloutFailed, *, is_final: bool) -> None:
        await self._append(
            event(
                "rollout_failed",
                rollout_id=outcome.rollout_id,
                group_id=outcome.group_id,
                member=outcome.member,
                reason=str(outcome.reason),
                error=outcome.error,
                n_sampled=outcome.n_sampled,
                num_tries=outcome.num_tries,
                is_final=is_final,
            )
        )

    async def _append(self, *events: Event, is_urgent: bool = False) -> None:
        """Append events; a caller that is cancelled meanwhile still waits for the acknowledgement, since a producer must know it."""
        sending = asyncio.ensure_future(self._producer.append(events=events, is_urgent=is_urgent))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise


async def _counted(outcome: RolloutFailed, engine: EngineHandle) -> RolloutFailed:
    """With the tokens that the engine sampled for it, where no worker is left that says so."""
    if outcome.n_sampled:
        return outcome
    try:
        return replace(outcome, n_sampled=await engine.close_rollout(outcome.rollout_id))
    except EngineError:
        return outcome


async def _all_or_first_error(members: Sequence[Coroutine[Any, Any, RolloutDone | RolloutFailed]]) -> list[RolloutDone | RolloutFailed]:
    """All outcomes in order; the first error cancels the others and is raised bare."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(member) for member in members]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
