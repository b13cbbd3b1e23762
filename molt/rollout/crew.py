"""The rollout workers of a run: placement, load, and what becomes of a rollout whose worker dies or overruns.

run(task) -> the least loaded worker with a free place, which meets the engine of the task first -> RolloutDone | RolloutFailed
no answer within rollout.timeout_s and a margin, or the process is gone -> RolloutFailed(attempt_lost); the worker is replaced
an agent that is past its time and does not await holds its worker's loop, and every rollout on it: a look from a thread of its own tells
    which, wait_ended_badly says so, the worker is replaced; that rollout failed by agent_timeout, those beside it are attempt_lost
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from molt.config import Config
from molt.errors import EngineError, LogError, MoltError
from molt.log.producer import Producer
from molt.log.rows import event
from molt.rollout.carried import from_bytes, to_bytes
from molt.rollout.engine import Engine
from molt.rollout.standstill import Standstill
from molt.rollout.tasks import FailureReason, RolloutDone, RolloutFailed, RolloutTask, failed_rollout

_MARGIN_S = 60.0
"""Beyond rollout.timeout_s: for the log's acknowledgement and a worker that is busy."""
_LATE_S = 15.0
"""Beyond rollout.timeout_s: a rollout that is still there keeps its worker from going by the limits that it sets itself."""
_STANDSTILL_S = 10.0
"""Longest turn of a worker's loop with a rollout on it that is late."""
_LOOK_S = 2.0
_LOOK_LIMIT_S = 20.0
_START_LIMIT_S = 300.0
_NUM_STARTS = 3
"""Times that a worker is started which dies before it is there."""
_CANCEL_LIMIT_S = 25.0
_STOP_LIMIT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Station:
    """One worker as the driver sees it."""

    name: str
    actor: Any
    ready: asyncio.Task[None] = field(init=False)
    """Done once its agent has started: an actor takes calls before that."""
    watching: asyncio.Task[None] = field(init=False)
    num_running: int = 0
    began: dict[str, float] = field(default_factory=dict)
    """Clock at which each of its rollouts was handed over."""
    standstill: Standstill | None = None
    """What held its loop when it was replaced for that."""
    met: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    """Engines that it was given, by name: a handle takes longer to unpickle than a task."""


class Crew:
    """Workers behind one `run`."""

    def __init__(self, config: Config, *, sink: Any, model_path: str | None = None) -> None:
        self._config = config
        self._sink = sink
        self._model_path = model_path
        self._stations: list[Station] = []
        self._places = asyncio.Semaphore(config.rollout.num_workers * config.rollout.max_concurrency)
        self._num_hired = 0
        self._producer = Producer(sink, "crew")

    async def start(self) -> None:
        """Start all workers; an agent file or template that cannot work is told here."""
        self._stations = [self._hire() for _ in range(self._config.rollout.num_workers)]
        await asyncio.gather(*(station.ready for station in self._stations))

    def _hire(self) -> Station:
        name = f"worker-{self._num_hired}"
        self._num_hired += 1
        station = Station(name=name, actor=self._launch(name))
        station.ready = asyncio.create_task(self._ready(station), name=f"start {name}")
        station.watching = asyncio.create_task(self._watch(station), name=f"watch {name}")
        return station

    def _launch(self, name: str) -> Any:
        import ray

        from molt.rollout.worker import RolloutWorker

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 10_000, "max_restarts": 0, "concurrency_groups": {"watch": 1}}
        return ray.remote(**options)(RolloutWorker).remote(name, self._config, sink=self._sink, model_path=self._model_path)

    async def _ready(self, station: Station) -> None:
        """Return once a worker has started; one that dies meanwhile is started again, a few times."""
        import ray

        for number in range(1, _NUM_STARTS + 1):
            try:
                return await asyncio.wait_for(station.actor.start.remote(), _START_LIMIT_S)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, MoltError):
                    raise error.cause from error
                raise EngineError(f"{station.name} does not start: {type(error.cause).__name__}: {error.cause}") from error
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, TimeoutError) or number == _NUM_STARTS:
                    raise EngineError(f"{station.name} does not start: {type(error).__name__}: {error}") from error
                station.actor = self._launch(station.name)

    async def run(self, task: RolloutTask, engine: Engine) -> RolloutDone | RolloutFailed:
        """Run one rollout against the engine that it names. LogError when the log does not take its segments: that ends the run."""
        import ray

        async with self._places:
            station = min(self._stations, key=lambda item: item.num_running)
            station.num_running += 1
            limit_s = self._config.rollout.timeout_s + _MARGIN_S
            try:
                await asyncio.shield(station.ready)
                async with asyncio.timeout(limit_s):
                    await self._introduce(station, task.engine, engine)
                    station.began[task.rollout_id] = time.monotonic()
                    return from_bytes(await station.actor.call.remote(to_bytes(task)))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, LogError):
                    raise error.cause from error
                return failed_rollout(task, FailureReason.ATTEMPT_LOST, f"{type(error.cause).__name__}: {error.cause}")
            except (ray.exceptions.RayError, TimeoutError) as error:
                await self._replace(station)
                if station.standstill is not None:
                    return _held(task, station, station.standstill)
                said = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
                return failed_rollout(task, FailureReason.ATTEMPT_LOST, f"{station.name}: {said}")
            finally:
                station.num_running -= 1
                station.began.pop(task.rollout_id, None)

    async def _watch(self, station: Station) -> None:
        """Replace a worker whose loop does not turn, once a rollout on it is past its time. Ends when the worker is replaced."""
        late_s = self._config.rollout.timeout_s + _LATE_S
        while station in self._stations:
            await asyncio.sleep(_LOOK_S)
            first = min(station.began.values(), default=None)
            if first is None or time.monotonic() - first < late_s:
                continue
            found = await self._look(station)
            if found is not None and found.seconds >= _STANDSTILL_S and station in self._stations:
                station.standstill = found
                await asyncio.gather(self._tell(station, found), self._replace(station))

    async def _look(self, station: Station) -> Standstill | None:
        import ray

        try:
            return await asyncio.wait_for(station.actor.watch.options(concurrency_group="watch").remote(), _LOOK_LIMIT_S)
        except TimeoutError:
            return Standstill(task=None, place="a place that lets no other thread run", seconds=_LOOK_LIMIT_S)
        except ray.exceptions.RayError:
            return None  # its rollouts are told as well

    async def _tell(self, station: Station, found: Standstill) -> None:
        timeout_s = self._config.rollout.timeout_s
        detail = f"{found.seconds:.0f} s in {found.place}; {len(station.began)} rollouts were on it; it is replaced"
        what = f"rollout {found.task}" if found.task in station.began else "a turn of its loop"
        await self._producer.append(events=[event("wait_ended_badly", what=what, who=station.name, limit_s=timeout_s, detail=detail)])

    async def _introduce(self, station: Station, name: str, engine: Engine) -> None:
        """Return once the worker knows the engine; an engine in place of another has a name of its own."""
        if name not in station.met:
            station.met[name] = asyncio.ensure_future(station.actor.meet.remote(name, engine))
        await asyncio.shield(station.met[name])

    async def cancel(self, task: RolloutTask) -> RolloutDone | RolloutFailed | None:
        """End a rollout whose `run` was cancelled, and say how it ended: done if it was already on its way into the log.

        None: no worker knows of it; one that is gone may have put it into the log before.
        """
        import ray

        for station in self._stations:
            try:
                found = await asyncio.wait_for(station.actor.cancel.remote(task.rollout_id), _CANCEL_LIMIT_S)
            except (ray.exceptions.RayError, TimeoutError):
                continue
            if found is not None:
                return found
        return None

    async def _replace(self, station: Station) -> None:
        """A new worker in place of one that is gone or hangs; several rollouts may notice, one replaces."""
        import ray

        if station not in self._stations:
            return
        fresh = self._hire()
        self._stations[self._stations.index(station)] = fresh
        ray.kill(station.actor)
        await asyncio.shield(fresh.ready)

    async def stop(self) -> None:
        """End all workers, letting agents close what they opened."""
        import ray

        for station in self._stations:
            station.watching.cancel()
            try:
                await asyncio.wait_for(station.actor.stop.remote(), _STOP_LIMIT_S)
            except (ray.exceptions.RayError, TimeoutError):
                pass
            finally:
                ray.kill(station.actor)
        self._stations = []


def _held(task: RolloutTask, station: Station, found: Standstill) -> RolloutFailed:
    """How a rollout ended on a worker that was replaced because its loop did not turn: the one that held it, and those beside it."""
    if task.rollout_id == found.task:
        said = f"past rollout.timeout_s it held {station.name} for {found.seconds:.0f} s in {found.place} without an await"
        return failed_rollout(task, FailureReason.AGENT_TIMEOUT, f"{said}; await, or run what computes for long in a thread or a process")
    holder = "an agent" if found.task is None else found.task
    return failed_rollout(task, FailureReason.ATTEMPT_LOST, f"{station.name} was held by {holder} in {found.place}, and replaced")
