"""The engines of a run together: start, who serves, which one a rollout sticks to, and the refit of all of them.

refit:  hold rollouts' calls -> pause all -> every engine loads and compares digests -> all that agree resume
        none agrees: RefitError, the old version serves on everywhere
        some do not: those are out of service (their rollouts are tried again elsewhere) until a later refit succeeds on them
An engine that dies is out of service for good; when none is left, EngineError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from molt.errors import EngineError, RefitError
from molt.rollout.engine import EngineInfo, RefitReport, WeightSource
from molt.rollout.engine_actor import EngineHandle, launch_engine
from molt.rollout.spec import EngineSpec
from molt.rollout.tasks import RefitTimes
from molt.rollout.weights import model_digest

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Berth:
    """One engine as the driver sees it."""

    handle: EngineHandle
    info: EngineInfo | None = None
    num_rollouts: int = 0
    """Rollouts that stick to it now."""
    is_stale: bool = False
    """It missed a refit: out of service until it takes a later one."""
    death: str | None = None
    """Why it is out of service for good."""

    @property
    def is_serving(self) -> bool:
        """Whether new rollouts may go to it."""
        return self.death is None and not self.is_stale


@dataclass(slots=True)
class Fleet:
    """All engines of a run."""

    specs: Sequence[EngineSpec]
    launch: Callable[[EngineSpec], EngineHandle] = launch_engine
    berths: dict[str, Berth] = field(default_factory=dict)
    policy_version: int = 0

    async def start(self) -> list[EngineInfo]:
        """Start all; EngineError unless every one starts and all serve the same weights."""
        self.berths = {spec.name: Berth(handle=self.launch(spec)) for spec in self.specs}
        infos = await asyncio.gather(*(berth.handle.start() for berth in self.berths.values()))
        for berth, info in zip(self.berths.values(), infos, strict=True):
            berth.info = info
        digests = {info.name: info.weights_digest for info in infos}
        if len(set(digests.values())) != 1:
            raise EngineError(f"engines started with different weights: {digests}; give all the same model")
        self.policy_version = infos[0].policy_version
        return list(infos)

    @property
    def serving(self) -> list[Berth]:
        """Engines that take rollouts now."""
        return [berth for berth in self.berths.values() if berth.is_serving]

    def take_berth(self) -> Berth:
        """The least loaded engine, with one more rollout; EngineError when none serves."""
        if not self.serving:
            told = {name: berth.death or "missed a refit" for name, berth in self.berths.items()}
            raise EngineError(f"no engine is left to serve rollouts: {told}")
        berth = min(self.serving, key=lambda item: item.num_rollouts)
        berth.num_rollouts += 1
        return berth

    async def examine(self, name: str) -> bool:
        """Whether an engine that failed a call still answers; one that does not is out of service for good."""
        berth = self.berths[name]
        if berth.death is None:
            try:
                await berth.handle.health()
            except EngineError as error:
                self.retire(name, str(error))
        return berth.death is None

    def retire(self, name: str, why: str) -> None:
        """Put an engine out of service for good and end its process."""
        berth = self.berths[name]
        if berth.death is None:
            berth.death = why
            berth.handle.kill()

    async def refit(self, source: WeightSource, *, pause_mode: str) -> RefitTimes:
        """Give all engines new weights. RefitError when no engine took them; then the old version serves on."""
        alive = {name: berth.handle for name, berth in self.berths.items() if berth.death is None}
        begin = time.perf_counter()
        held = await self._each(alive, lambda handle: handle.pause(pause_mode))
        paused = time.perf_counter()
        reports = await self._each({name: alive[name] for name in held[0]}, lambda handle: handle.refit(source))
        loaded = time.perf_counter()
        failed = {**held[1], **reports[1], **_liars(source, reports[0])}
        good = {name: report for name, report in reports[0].items() if name not in failed}
        if not good:
            await self._each({name: alive[name] for name in held[0]}, lambda handle: handle.resume())
            raise RefitError("; ".join(f"{name}: {error}" for name, error in failed.items()) or "no engine is alive")
        for name in good:
            self.berths[name].is_stale = False
        for name in failed:
            self.berths[name].is_stale = True
        resumed = await self._each({name: alive[name] for name in good}, lambda handle: handle.resume())
        await self._end_stale(failed)
        self.policy_version = source.policy_version
        verify_s = max(report.verify_s for report in good.values())
        return RefitTimes(
            policy_version=source.policy_version,
            weights_digest=model_digest(source.digests),
            engines={name: report.weights_digest for name, report in good.items()},
            pause_s=paused - begin,
            transfer_s=max(0.0, loaded - paused - verify_s),
            verify_s=verify_s,
            resume_s=time.perf_counter() - loaded,
            size_bytes=int(source.options.get("size_bytes", 0)),
            num_in_flight=sum(held[0].values()),
            failed={name: str(error) for name, error in {**failed, **resumed[1]}.items()},
        )

    async def _end_stale(self, failed: dict[str, Exception]) -> None:
        """Engines that missed the refit end and refuse calls, so that their rollouts are tried again elsewhere."""
        for name in failed:
            await self.examine(name)
        stale = {name: self.berths[name].handle for name in failed if self.berths[name].death is None}
        await self._each(stale, lambda handle: handle.refuse(f"it missed a refit ({failed[handle.name]})"))

    async def _each(
        self, handles: dict[str, EngineHandle], ask: Callable[[EngineHandle], Awaitable[T]]
    ) -> tuple[dict[str, T], dict[str, Exception]]:
        """Ask all at once: answers by engine, and errors by engine."""
        answers = await asyncio.gather(*(ask(handle) for handle in handles.values()), return_exceptions=True)
        good: dict[str, T] = {}
        bad: dict[str, Exception] = {}
        for name, answer in zip(handles, answers, strict=True):
            if isinstance(answer, Exception):
                bad[name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good[name] = answer
        return good, bad

    async def stop(self) -> None:
        """Stop every engine that lives."""
        await asyncio.gather(*(berth.handle.stop() for berth in self.berths.values() if berth.death is None))


def _liars(source: WeightSource, reports: dict[str, RefitReport]) -> dict[str, Exception]:
    """Engines that say they serve another version than was sent."""
    return {
        name: RefitError(f"reports version {report.policy_version}, version {source.policy_version} was sent")
        for name, report in reports.items()
        if report.policy_version != source.policy_version
    }
