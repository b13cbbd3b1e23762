"""The engines of a run together: start, who serves, which one a rollout sticks to, and the refit of all of them.

refit:  hold rollouts' calls -> pause all -> every engine loads and compares digests -> all that agree resume
        none agrees: RefitError, the old version serves on everywhere
        some do not: those are out of service (their rollouts are tried again elsewhere) until a later refit succeeds on them
An engine that dies, or does not start, is out of service for good, and another starts in its place: a newcomer. It takes the newest
weights from where they lie (file, handles), or waits for a broadcast of its own; rollouts wait with it when no other engine serves. When
none is left and none comes, EngineError.
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
"""New engines one after another in the same place of which none took a refit with the others."""
_PROBE_LIMIT_S = 60.0
_LOOK_S = 0.05


@dataclass(slots=True, kw_only=True)
class Berth:
    """One engine as the driver sees it."""

    spec: EngineSpec
    handle: EngineHandle
    num_rollouts: int = 0
    """Rollouts that stick to it now."""
    is_stale: bool = False
    """It has not the newest weights: out of service until it takes them."""
    is_newcomer: bool = False
    """It came in place of another, could not take the weights by itself, and no refit was tried on it yet."""
    death: str | None = None
    """Why it is out of service for good."""
    num_replaced: int = 0
    """Engines before it in its place."""
    num_failed: int = 0
    """Those that ended one after another just before it, and had not settled."""
    is_settled: bool = False
    """It took a refit with the others: what ends it now has nothing to do with what ended the one before."""

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
        self._first: EngineInfo | None = None
        """What an engine served at the start."""
        self._source: WeightSource | None = None
        """Weights that all engines took last."""
        self._coming: dict[str, asyncio.Task[None]] = {}
        """Replacements under way, by the name of the engine that they replace."""
        self._one_refit = asyncio.Lock()
        self._is_awake = asyncio.Event()
        """Cleared while engines sleep: one that started then would take the memory that the trainer steps in."""
        self._is_awake.set()

    async def start(self) -> list[EngineInfo]:
        """Start all. One that does not start is replaced as one that dies is, while the others serve; EngineError when none starts."""
        self.berths = {spec.name: Berth(spec=spec, handle=self._launch(spec)) for spec in self.specs}
        infos, failed = await self._each(self._handles(), lambda handle: handle.start())
        if other := next((error for error in failed.values() if not isinstance(error, EngineError)), None):
            raise other
        if not infos:
            told = "; ".join(dict.fromkeys(str(error) for error in failed.values()))
            raise EngineError(f"no engine started: {told}; molt train --resume RUN starts them again") from next(iter(failed.values()))
        digests = {info.name: info.weights_digest for info in infos.values()}
        if len(set(digests.values())) != 1:
            raise EngineError(f"engines started with different weights: {digests}; give all the same model")
        self._first = next(iter(infos.values()))
        self.policy_version = self._first.policy_version
        for name, error in failed.items():
            self.retire(name, f"it did not start: {error}")
        return list(infos.values())

    @property
    def serving(self) -> list[Berth]:
        """Engines that take rollouts now."""
        return [berth for berth in self.berths.values() if berth.is_serving]

    async def take_berth(self) -> Berth:
        """The least loaded engine, with one more rollout. Waits for a newcomer when none serves; EngineError when none comes."""
        while not self.serving:
            if self._coming:
                await asyncio.wait(set(self._coming.values()), return_when=asyncio.FIRST_COMPLETED)
            elif self.newcomers:
                await asyncio.sleep(_LOOK_S)  # the driver refits it; a run that waits too long is ended by train.step_timeout_s
            else:
                told = {name: berth.death or "missed a refit" for name, berth in self.berths.items()}
                raise EngineError(f"no engine is left to serve rollouts: {told}")
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
        self._try_again(berth)

    def _try_again(self, berth: Berth) -> None:
        if berth.is_settled or berth.num_failed < MAX_REPLACEMENTS:
            self._coming[berth.spec.name] = asyncio.create_task(self._replace(berth), name=f"replace {berth.spec.name}")

    async def _replace(self, old: Berth) -> None:
        """Start an engine in place of one that is gone; it serves once it has the newest weights."""
        number = old.num_replaced + 1
        spec = replace(old.spec, name=f"{old.spec.name.partition('+')[0]}+{number}")
        try:
            await self._is_awake.wait()
            num_failed = 1 if old.is_settled else old.num_failed + 1
            berth = Berth(spec=spec, handle=self._launch(spec), is_stale=True, num_replaced=number, num_failed=num_failed)
            info = await berth.handle.start()
            if self._first is not None and info.weights_digest != self._first.weights_digest:
                raise EngineError(f"it loaded other weights ({info.weights_digest}) than {self._first.name} did at the start")
            async with self._one_refit:
                self.berths[spec.name] = berth
                if self._source is not None and self._source.reaches is not None:
                    berth.is_newcomer = True
                    return
                if self._source is not None:
                    await berth.handle.pause("keep")
                    await berth.handle.refit(self._source)
                    await berth.handle.resume()
                berth.is_stale = False
        except RefitError as error:
            berth.is_newcomer = True
            _LOG.warning("engine %s waits for the next refit: %s", spec.name, error)
        except EngineError as error:
            self.berths[spec.name] = berth
            berth.death = f"it did not start in place of {old.spec.name}: {error}"
            berth.handle.kill()
            _LOG.warning("engine %s: %s", spec.name, berth.death)
            self._try_again(berth)
        finally:
            del self._coming[old.spec.name]

    @property
    def newcomers(self) -> list[str]:
        """Engines that came in place of others and wait for weights."""
        return [name for name, berth in self.berths.items() if berth.death is None and berth.is_newcomer]

    async def alive(self) -> list[str]:
        """Engines that a refit would reach now; waits for a newcomer when there is none, unless it comes only after the wake."""
        while self._coming and not self._handles() and self._is_awake.is_set():
            await asyncio.wait(set(self._coming.values()), return_when=asyncio.FIRST_COMPLETED)
        return list(self._handles())

    def _handles(self) -> dict[str, EngineHandle]:
        return {name: berth.handle for name, berth in self.berths.items() if berth.death is None}

    async def refit(
        self,
        source: WeightSource,
        *,
        pause_mode: str,
        send: Send | None = None,
        only: Sequence[str] | None = None,
        allowed: Callable[[], Awaitable[None]] | None = None,
    ) -> RefitTimes:
        """Give engines new weights. RefitError when no engine took them; then the old version serves on.

        send: what the trainer does while engines receive (a broadcast); None when the weights lie ready. only: these engines, in
        place of all. allowed: awaited between their arrival and the first token that they sample; what it raises leaves engines paused.
        """
        await self.alive()
        async with self._one_refit:
            return await self._refit(source, pause_mode, send, only, allowed)

    def _reached(self, source: WeightSource, only: Sequence[str] | None) -> dict[str, EngineHandle]:
        """The engines that a refit asks. RefitError for a broadcast that cannot reach all of its engines: it would never end."""
        alive = self._handles()
        if source.reaches is not None and (gone := sorted(source.reaches - alive.keys())):
            raise RefitError(f"engine {', '.join(gone)} died after the trainer's process group was planned; plan it again")
        wanted = source.reaches if source.reaches is not None else alive if only is None else only
        return {name: handle for name, handle in alive.items() if name in wanted}

    async def _refit(
        self,
        source: WeightSource,
        pause_mode: str,
        send: Send | None,
        only: Sequence[str] | None,
        allowed: Callable[[], Awaitable[None]] | None,
    ) -> RefitTimes:
        alive = self._reached(source, only)
        begin = time.perf_counter()
        counts, unpaused = await self._each(alive, lambda handle: handle.pause(pause_mode))
        held = {name: alive[name] for name in counts}
        paused = time.perf_counter()
        try:
            reports, refused = await self._deliver(held, source, send)
        except BaseException:
            await self._each(held, lambda handle: handle.resume())
            raise
        loaded = time.perf_counter()
        if allowed is not None:
            await allowed()
        good = {name: report for name, report in reports.items() if report.policy_version == source.policy_version}
        liars = {name: RefitError(f"reports version {reports[name].policy_version}") for name in reports if name not in good}
        failed = {**unpaused, **refused, **liars}
        _, unresumed = await self._each({name: held[name] for name in good}, lambda handle: handle.resume())
        await self._settle(failed, unpaused=unpaused, is_any_good=bool(good))
        for name, error in unresumed.items():
            self.retire(name, str(error))  # paused for ever, it would hold every call that it is given
        if not good:
            raise RefitError("; ".join(f"{name}: {error}" for name, error in failed.items()) or "no engine is alive")
        for name in good:
            self.berths[name].is_stale = self.berths[name].is_newcomer = False
            self.berths[name].is_settled = True
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
            num_in_flight=sum(counts.values()),
            caches=tuple(sorted({cache for report in good.values() for cache in report.caches})),
            failed={name: str(error) for name, error in {**failed, **unresumed}.items()},
        )

    async def _deliver(
        self, held: dict[str, EngineHandle], source: WeightSource, send: Send | None
    ) -> tuple[dict[str, RefitReport], dict[str, Exception]]:
        """Let paused engines take the weights, while the trainer sends them if it must. Every wait has vllm.refit_timeout_s."""
        if source.reaches is not None and held.keys() != source.reaches:
            return {}, {name: RefitError("not begun, since a broadcast needs every engine of its group") for name in held}
        receipt = self._each(held, lambda handle: handle.refit(source))
        if send is None:
            return await receipt
        answers, sent = await asyncio.gather(receipt, send(), return_exceptions=True)
        if isinstance(answers, BaseException):
            raise answers
        reports, refused = answers
        if isinstance(sent, BaseException):
            _LOG.warning("the trainer's broadcast ended with %s: %s", type(sent).__name__, sent)
            refused = {name: type(error)(f"{error}; the trainer's broadcast failed: {sent}") for name, error in refused.items()}
        return reports, refused

    async def _settle(self, failed: dict[str, Exception], *, unpaused: dict[str, Exception], is_any_good: bool) -> None:
        """What becomes of engines that did not take the weights.

        One that said no (RefitError) still holds the old ones: it serves on if all said no, else it is out of service until a later
        refit. One that did not answer a refit is in a state that nobody knows: it is replaced. One that could not be paused is probed.
        """
        for name, error in failed.items():
            if name in unpaused:
                await self.examine(name)
            elif not isinstance(error, RefitError):
                self.retire(name, str(error))
        left = {name: self.berths[name].handle for name in failed if self.berths[name].death is None}
        if not is_any_good:
            await self._each(left, lambda handle: handle.resume())  # one that has no whole weights stays paused for the next try
            return
        for name in left:
            self.berths[name].is_stale = True
            self.berths[name].is_newcomer = False  # it was tried and said no
        await self._each(left, lambda handle: handle.refuse(f"it missed a refit ({failed[handle.name]})"))

    async def sleep(self, level: int) -> None:
        """Free the GPU memory of all engines while a trainer steps there; calls are held. One that cannot is replaced.

        No engine takes its memory in the middle of the step: one that is on its way is awaited, and others start after the wake.
        """
        if self._coming:
            await asyncio.wait(set(self._coming.values()))
        self._is_awake.clear()
        await self._all_or_replaced(lambda handle: handle.sleep(level))

    async def wake(self, *, is_refit_next: bool) -> None:
        """Take the memory back. Calls go on at once, or after the refit that comes next (level 2 needs one)."""
        self._is_awake.set()
        await self._all_or_replaced(lambda handle: handle.wake())
        if not is_refit_next:
            await self._all_or_replaced(lambda handle: handle.resume())

    async def _all_or_replaced(self, ask: Callable[[EngineHandle], Awaitable[None]]) -> None:
        for name, error in (await self._each(self._handles(), ask))[1].items():
            self.retire(name, str(error))

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
