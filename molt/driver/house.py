"""The parts of one running attempt: log writer, engines and workers, trainer ranks, opened in order and closed in reverse.

ray -> log actor (the only writer) -> engines + workers (pool) and trainer ranks, side by side
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from molt import environ
from molt.config import Config
from molt.driver.changes import provenance
from molt.errors import MoltError
from molt.learn.ranks import RankGroup
from molt.log.actor import RaySink, start_log_actor, stop_log_actor
from molt.log.producer import Producer
from molt.log.reader import LogReader
from molt.log.rows import event
from molt.placement import Seats, take_seats
from molt.rollout.engine import EngineInfo
from molt.rollout.pool import RolloutPool
from molt.rollout.spec import engine_kind
from molt.runs import RunDir
from molt.settings import config_digest

T = TypeVar("T")
OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a local Ray session: token rows pass through it, weights do not."""
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Everything that the driver of one attempt holds."""

    config: Config
    run: RunDir
    attempt: int
    producer: Producer
    reader: LogReader
    pool: RolloutPool
    ranks: RankGroup
    engines: list[EngineInfo]


@asynccontextmanager
async def open_house(config: Config, run: RunDir, *, num_steps: int, say: Callable[[str], None]) -> AsyncIterator[House]:
    """Start the parts; on leaving, stop them in reverse, whatever happened. The log is closed last."""
    async with AsyncExitStack() as stack:
        stack.enter_context(ray_session(config))
        attempt = run.begin_attempt()
        say("starting the log writer")
        log = start_log_actor(run.path, run=run.name, attempt=attempt, store=config.log.store)
        stack.push(partial(_close_log, log, is_sealing=config.log.seal, say=say))
        sink = RaySink(log)
        seats = stack.enter_context(gpu_seats(config))
        pool = RolloutPool(config, sink=sink, producer_name=f"pool-{attempt}", seats=seats.engines, run_dir=run.path)
        stack.push_async_callback(pool.stop)
        start_ranks = RankGroup.start(config, run_dir=run.path, run=run.name, attempt=attempt, log=log, num_steps=num_steps, seats=seats)
        starting = Starting(say, "engines and rollout workers", "trainer ranks")
        try:
            async with asyncio.TaskGroup() as tasks:
                engines = tasks.create_task(starting.part("engines and rollout workers", pool.start()))
                ranks = tasks.create_task(starting.part("trainer ranks", start_ranks))
                tasks.create_task(answering(ranks, until=engines))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        stack.push_async_callback(ranks.result().stop)
        yield House(
            config=config,
            run=run,
            attempt=attempt,
            producer=Producer(sink, f"driver-{attempt}"),
            reader=LogReader.open(run.path),
            pool=pool,
            ranks=ranks.result(),
            engines=engines.result(),
        )


async def answering(ranks: asyncio.Task[RankGroup], *, until: asyncio.Task[Any]) -> None:
    """See to it that ranks that are there stay there while others are on their way; a rank that died ends the start with its cause."""
    group = await ranks
    while not until.done():
        await group.settle()
        await asyncio.wait([until], timeout=_LOOK_S)


class Starting:
    """Says what is still on its way."""

    def __init__(self, say: Callable[[str], None], *names: str) -> None:
        self._say = say
        self._left = list(names)
        say(f"starting {', '.join(names)}")

    async def part(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Start one of them."""
        started = await work
        self._left.remove(name)
        if self._left:
            self._say(f"starting {', '.join(self._left)}; {name} are there")
        return started


def _close_log(
    log: Any,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
    *,
    is_sealing: bool,
    say: Callable[[str], None],
) -> None:
    """Seal and close the log. Where an error ends the run already, one of the seal is told beside it: the first cause wins."""
    try:
        stop_log_actor(log, is_sealing=is_sealing)
    except Exception as later:
        if error is None:
            raise
        say(f"the log is not sealed: {later}")


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS, or start a local one and end it on leaving. A session that is already there is used and left."""
    import ray

    if ray.is_initialized():
        yield
        return
    environ.prepare()
    address = environ.read("RAY_ADDRESS")
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False)
        else:
            ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES)
    except Exception as error:  # Ray raises plain ones
        ray.shutdown()
        what, way_out = ("Ray could not start", "see that this machine has time and memory left, then run again")
        if address is not None:
            what, way_out = (f"RAY_ADDRESS={address}, Ray cannot join that cluster", "start one there, or unset it for a local one")
        raise MoltError(f"{what} ({type(error).__name__}: {error}); {way_out}") from error
    try:
        yield
    finally:
        ray.shutdown()


def gpu_seats(config: Config) -> AbstractContextManager[Seats]:
    """The GPUs of the session, given out among ranks, a frozen model apart, and engines that use them."""
    from molt.learn.beside import needs_frozen

    return take_seats(
        config,
        has_frozen=config.reference.placement == "apart" and needs_frozen(config),
        has_engines=engine_kind(config) == "vllm",
    )


@asynccontextmanager
async def alongside(background: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine beside the body; it is cancelled when the body ends, and the first of their errors is raised bare."""
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(background)
            yield
            task.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a group that is no cancellation."""
    for error in group.exceptions:
        found = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group.exceptions[0]


async def say_started(
    house: House,
    *,
    model_digest: str,
    num_steps: int,
    resumed_from_step: int | None,
    checkpoint: Path | None,
    pipeline: str | None = None,
) -> None:
    """Append attempt_started: all that is needed to say what ran. pipeline: its file."""
    config, made = house.config, provenance(house.config, pipeline)
    started = event(
        "attempt_started",
        config=config.model_dump_json(),
        config_digest=config_digest(config),
        code_digest=made["code_digest"],
        agent_digest=made["agent_digest"],
        pipeline=made["pipeline"],
        packages=json.dumps(made["packages"], sort_keys=True),
        hardware=json.dumps(made["hardware"], sort_keys=True),
        seed=config.run.seed,
        resumed_from_step=resumed_from_step,
        resumed_from_checkpoint=None if checkpoint is None else checkpoint.name,
        model_digest=model_digest,
        num_steps=num_steps,
        pid=os.getpid(),
        host=platform.node(),
    )
    await house.producer.append(events=[started])
