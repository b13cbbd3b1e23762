"""The engines of a run together: start, who serves, which one a rollout sticks to, and the refit of all of them.

refit:  hold rollouts' calls -> pause all -> every engine loads and compares digests -> all that agree resume
        none agrees: RefitError, the old version serves on everywhere
        some do not: those are out of service (their rollouts are tried again elsewhere) until a later refit succeeds on them
An engine that dies is out of service for good; when none is left, EngineError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from molt.errors import EngineError, RefitError
from molt.rollout.engine import EngineInfo, RefitReport, WeightSource
from molt.rollout.engine_actor import EngineHandle, launch_engine
from molt.rollout.spec import EngineSpec
from molt.rollout.tasks import RefitTimes
from molt.rollout.weights import model_digest

T = TypeVar("T")
Send = Callable[[], Awaitable[None]]


_LOG = logging.getLogger(__name__)
MAX_REPLACEMENTS = 3
"""New engines in place of one that was asked for."""
_PROBE_LIMIT_S = 60.0


@dataclass(slots=True, kw_only=True)
class Berth:
    """One engine as the driver sees it."""

    spec: EngineSpec
    handle: EngineHandle
    num_rollouts: int = 0
    """Rollouts that stick to it now."""
    is_stale: bool = False
    """It has not the newest weights: out of service until it takes them."""
    death: str | None = None
    """Why it is out of service for good."""
    num_replaced: int = 0
    """Engines before it in its place."""

    @property
    def is_serving(self) -> bool:
        """Whether new rollouts may go to it."""
        return self.death is None and not self.is_stale


class Fleet:
    """All engines of a run."""

    def __init__(self, specs: Sequence[EngineSpec], launch: Callable[[EngineSpec], EngineHandle] = launch_engine) -> None:
        self.specs = specs
        self.berths: dict[str, Berth] = {}
        self.policy_version = 0
        self._launch = launch
        self._source: WeightSource | None = None
        """Weights that all engines took last."""
        self._coming: dict[str, asyncio.Task[None]] = {}
        """Replacements under way, by the name of the engine that they replace."""
        self._one_refit = asyncio.Lock()

    async def start(self) -> list[EngineInfo]:
        """Start all; EngineError unless every one starts and all serve the same weights."""
        self.berths = {spec.name: Berth(spec=spec, handle=self._launch(spec)) for spec in self.specs}
        infos = await asyncio.gather(*(berth.handle.start() for berth in self.berths.values()))
        digests = {info.name: info.weights_digest for info in infos}
        if len(set(digests.values())) != 1:
            raise EngineError(f"engines started with different weights: {digests}; give all the same model")
        self.policy_version = infos[0].policy_version
        return list(infos)

    @property
    def serving(self) -> list[Berth]:
        """Engines that take rollouts now."""
        return [berth for berth in self.berths.values() if berth.is_serving]

    async def take_berth(self) -> Berth:
        """The least loaded engine, with one more rollout. Waits for a replacement when none serves; EngineError when none comes."""
        while not self.serving:
            if not self._coming:
                told = {name: berth.death or "missed a refit" for name, berth in self.berths.items()}
                raise EngineError(f"no engine is left to serve rollouts: {told}")
            await asyncio.wait(set(self._coming.values()), return_when=asyncio.FIRST_COMPLETED)
        berth = min(self.serving, key=lambda item: item.num_rollouts)
        berth.num_rollouts += 1
        return berth

    async def examine(self, name: str) -> bool:
        """Whether an engine that failed a call still samples. One that does not is ended and replaced."""
        berth = self.berths[name]
        if berth.death is None:
            try:
                limit_s = min(_PROBE_LIMIT_S, berth.spec.request_timeout_s)
                health = await berth.handle.health(limit_s)
                if not health.is_paused and not berth.is_stale:
                    await berth.handle.probe(limit_s)
            except EngineError as error:
                self.retire(name, str(error))
        return berth.death is None

    def retire(self, name: str, why: str) -> None:
        """Put an engine out of service for good, end its process and start another in its place."""
        berth = self.berths[name]
        if berth.death is not None:
            return
        berth.death = why
        berth.handle.kill()
        _LOG.warning("engine %s is out of service: %s", name, why)
        if berth.num_replaced < MAX_REPLACEMENTS:
            self._coming[name] = asyncio.create_task(self._replace(berth), name=f"replace {name}")

    async def _replace(self, old: Berth) -> None:
        """Start an engine in place of one that is gone; it serves once it has the newest weights."""
        number = old.num_replaced + 1
        spec = replace(old.spec, name=f"{old.spec.name.partition('+')[0]}+{number}")
        berth = Berth(spec=spec, handle=self._launch(spec), is_stale=True, num_replaced=number)
        try:
            await berth.handle.start()
            async with self._one_refit:
                self.berths[spec.name] = berth
                if self._source is not None:
                    await berth.handle.pause("keep")
                    await berth.handle.refit(self._source)
                    await berth.handle.resume()
                berth.is_stale = False
        except RefitError as error:
            _LOG.warning("engine %s waits for the next refit: %s", spec.name, error)
        except EngineError as error:
            self.berths[spec.name] = berth
            berth.death = f"it did not start in place of {old.spec.name}: {error}"
            berth.handle.kill()
            _LOG.warning("engine %s: %s", spec.name, berth.death)
        finally:
            del self._coming[old.spec.name]

    async def refit(self, source: WeightSource, *, pause_mode: str, send: Send | None = None) -> RefitTimes:
        """Give all engines new weights. RefitError when no engine took them; then the old version serves on.

        send: what the trainer does while engines receive (a broadcast); None when the weights lie ready.
        """
        async with self._one_refit:
            return await self._refit(source, pause_mode, send)

    async def _refit(self, source: WeightSource, pause_mode: str, send: Send | None) -> RefitTimes:
        alive = {name: berth.handle for name, berth in self.berths.items() if berth.death is None}
        begin = time.perf_counter()
        held = await self._each(alive, lambda handle: handle.pause(pause_mode))
        paused = time.perf_counter()
        receipt = self._each({name: alive[name] for name in held[0]}, lambda handle: handle.refit(source))
        reports = await receipt if send is None else (await asyncio.gather(receipt, send()))[0]
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
        self.policy_version, self._source = source.policy_version, source
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
        """Stop every engine that lives or is on its way."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming, timeout=_PROBE_LIMIT_S)
        await asyncio.gather(*(berth.handle.stop() for berth in self.berths.values() if berth.death is None))


def _liars(source: WeightSource, reports: dict[str, RefitReport]) -> dict[str, Exception]:
    """Engines that say they serve another version than was sent."""
    return {
        name: RefitError(f"reports version {report.policy_version}, version {source.policy_version} was sent")
        for name, report in reports.items()
        if report.policy_version != source.policy_version
    }
