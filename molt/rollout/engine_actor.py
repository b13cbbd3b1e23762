"""An engine in a process of its own: a Ray async actor around any Engine, and the handle through which others call it.

    handle (worker, driver)                              actor
    generate -- request --> gate (open unless a refit waits for calls to end) --> Engine.generate
       |  every beat: health -------------------------> in flight, tokens sampled so far, paused
       |  no answer, or no new token for request_timeout_s though not paused --> EngineError names the engine
    a dead process is told by Ray at once; a cancelled caller aborts its request

A long healthy call is never cut: only silence is. A retried request_id joins the running one inside the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from molt.data.images import Image
from molt.errors import EngineError, MoltError
from molt.machine import show_stacks_on_signal
from molt.rollout.carried import from_bytes, to_bytes
from molt.rollout.engine import Engine, EngineInfo, Generation, RefitReport, Sampling, WeightSource, nothing_sampled
from molt.rollout.spec import EngineSpec, make_engine

T = TypeVar("T")
_BEAT_S = 2.0
_CONTROL_LIMIT_S = 30.0
_NUM_NOTED = 1 << 16
"""Rollouts whose tokens an engine remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """A sign of life."""

    num_in_flight: int
    num_sampled: int
    """Tokens sampled since start: it grows while the engine works."""
    is_paused: bool
    pid: int


class EngineActor:
    """The actor's body. `pause` also knows mode wait: hold new calls and let running ones end first."""

    def __init__(self, spec: EngineSpec) -> None:
        show_stacks_on_signal()
        self._spec = spec
        self._engine: Engine = make_engine(spec)
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held: dict[str, asyncio.Event] = {}
        """Calls at the gate; set once nobody wants them any more."""
        self._running: dict[str, int] = {}
        """Calls inside the engine, and how many wait for the answer of each."""
        self._sampled: dict[str, int] = {}
        """Tokens of finished calls by rollout, the newest last: a worker that is gone can no longer say."""
        self._num_in_flight = 0
        self._num_finished = 0
        self._is_paused = False
        self._refusal: str | None = None

    async def start(self) -> EngineInfo:
        """Load the model."""
        return await self._engine.start()

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """One model call; it waits at the gate while a refit waits for others to end."""
        if not self._gate.is_set() and not await self._is_let_in(request_id):
            return nothing_sampled()
        if self._refusal is not None:
            raise EngineError(f"engine {self._spec.name} is out of service: {self._refusal}")
        self._num_in_flight += 1
        self._idle.clear()
        self._running[request_id] = self._running.get(request_id, 0) + 1
        try:
            generation = await self._engine.generate(request_id, prompt_ids, sampling, images)
            if self._running[request_id] == 1:
                self._note(_rollout_of(request_id), len(generation.token_ids))
            return generation
        finally:
            self._running[request_id] -= 1
            if not self._running[request_id]:
                del self._running[request_id]
            self._num_in_flight -= 1
            self._num_finished += 1
            if self._num_in_flight == 0:
                self._idle.set()

    def _note(self, rollout_id: str, n_sampled: int) -> None:
        self._sampled[rollout_id] = self._sampled.pop(rollout_id, 0) + n_sampled
        while len(self._sampled) > _NUM_NOTED:
            del self._sampled[next(iter(self._sampled))]

    async def close_rollout(self, rollout_id: str) -> int:
        """Cut what still runs of a rollout that nobody goes on with; returns the tokens of all of its calls."""

        def left() -> list[str]:
            return [name for name in (*self._running, *self._held) if _rollout_of(name) == rollout_id]

        for request_id in left():
            await self.abort(request_id)
        until = time.monotonic() + _BEAT_S
        while left() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return self._sampled.pop(rollout_id, 0)

    async def _is_let_in(self, request_id: str) -> bool:
        """Wait at the gate; False as soon as the call was aborted there."""
        left = self._held.setdefault(request_id, asyncio.Event())
        waits = [asyncio.create_task(self._gate.wait()), asyncio.create_task(left.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._held.pop(request_id, None)
            for wait in waits:
                wait.cancel()
        return not left.is_set()

    async def call(self, data: bytes) -> bytes:
        """`generate` with its arguments and its answer packed."""
        return to_bytes(await self.generate(*from_bytes(data)))

    async def abort(self, request_id: str) -> None:
        """End one request early; one at the gate never begins."""
        if request_id in self._held:
            self._held[request_id].set()
        await self._engine.abort(request_id)

    async def pause(self, mode: str = "keep") -> int:
        """Hold generation; mode keep, abort, or wait (running calls end first)."""
        self._gate.clear()
        try:
            if mode == "wait":
                await asyncio.wait_for(self._idle.wait(), self._spec.refit_timeout_s)
            count = await self._engine.pause("keep" if mode == "wait" else mode)
        except TimeoutError as error:
            self._gate.set()
            raise EngineError(
                f"vllm.refit_timeout_s={self._spec.refit_timeout_s:g}, {self._num_in_flight} calls of engine {self._spec.name} "
                "did not end within it; raise it, or set train.partial_rollout_enable"
            ) from error
        except BaseException:
            self._gate.set()
            raise
        self._is_paused = True
        return count

    async def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights while paused."""
        return await self._engine.refit(source)

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()
        self._is_paused = False
        self._refusal = None
        self._gate.set()

    async def refuse(self, why: str) -> None:
        """End running calls as abort and refuse new ones until the next resume: its weights are not the run's."""
        self._refusal = why
        await self.pause("abort")
        self._gate.set()

    async def sleep(self, level: int) -> None:
        """Hold calls and free GPU memory; only engines that can."""
        if not hasattr(self._engine, "sleep"):
            raise EngineError(f"engine {self._spec.name} cannot sleep; set vllm.sleep_level=0")
        await self.pause("keep")
        await self._engine.sleep(level)

    async def wake(self) -> None:
        """Take the memory back; calls are held until resume."""
        await self._engine.wake()  # type: ignore[attr-defined]

    async def weights_digest(self) -> str:
        """Digest over the tensors that it serves."""
        return await self._engine.weights_digest()

    async def health(self) -> EngineHealth:
        """Answered between passes by the same loop that serves calls; EngineError once the engine cannot sample any more."""
        import os

        if (death := getattr(self._engine, "death", None)) is not None:
            raise EngineError(f"engine {self._spec.name} is dead: {death}")
        sampled = getattr(self._engine, "num_sampled", self._num_finished)
        return EngineHealth(num_in_flight=self._num_in_flight, num_sampled=sampled, is_paused=self._is_paused, pid=os.getpid())

    async def stop(self) -> None:
        """End requests as abort and free everything."""
        await self._engine.stop()


def launch_engine(spec: EngineSpec) -> EngineHandle:
    """Place the actor (the model is loaded by `start`)."""
    import ray

    place = {"num_gpus": spec.num_gpus} if spec.seat is None else spec.seat.options()
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 10_000, "max_restarts": 0, **place}
    if spec.env:
        options["runtime_env"] = {"env_vars": dict(spec.env)}
    actor = ray.remote(EngineActor).options(**options).remote(spec)
    return EngineHandle(actor, spec)


class EngineHandle:
    """Engine over an actor; it pickles. Every wait of it has a limit, and EngineError names the engine."""

    def __init__(self, actor: Any, spec: EngineSpec) -> None:
        self._actor = actor
        self.spec = spec
        self._num_waiting = 0
        self._silence: asyncio.Future[None] | None = None
        self._beat: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineHandle, (self._actor, self.spec)

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.spec.name

    async def start(self) -> EngineInfo:
        """Load the model within vllm.start_timeout_s."""
        return await self._ask("start", self._actor.start.remote(), self.spec.start_timeout_s)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """One model call. EngineError when the engine dies, or is silent for vllm.request_timeout_s."""
        silence = self._listen()
        call = to_bytes((request_id, np.asarray(prompt_ids, np.int32), sampling, images))
        answer = asyncio.ensure_future(_told(self.name, self._actor.call.remote(call)))
        try:
            await asyncio.wait({answer, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                silence.result()
            return from_bytes(await answer)
        except BaseException:
            self._actor.abort.remote(request_id)  # nobody waits for it any more
            raise
        finally:
            answer.cancel()
            self._num_waiting -= 1

    async def abort(self, request_id: str) -> None:
        """End one request early."""
        await self._ask("abort", self._actor.abort.remote(request_id), _CONTROL_LIMIT_S)

    async def close_rollout(self, rollout_id: str) -> int:
        """Cut what still runs of a rollout that nobody goes on with; returns the tokens of all of its calls."""
        return await self._ask("close_rollout", self._actor.close_rollout.remote(rollout_id), _CONTROL_LIMIT_S)

    async def pause(self, mode: str = "keep") -> int:
        """Hold generation: keep, abort, or wait for running calls."""
        limit = self.spec.refit_timeout_s + _BEAT_S if mode == "wait" else min(self.spec.refit_timeout_s, _CONTROL_LIMIT_S)
        return await self._ask("pause", self._actor.pause.remote(mode), limit)

    async def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights within vllm.refit_timeout_s."""
        return await self._ask("refit", self._actor.refit.remote(source), self.spec.refit_timeout_s)

    async def resume(self) -> None:
        """Go on."""
        await self._ask("resume", self._actor.resume.remote(), _CONTROL_LIMIT_S)

    async def refuse(self, why: str) -> None:
        """Take no calls until the next resume."""
        await self._ask("refuse", self._actor.refuse.remote(why), _CONTROL_LIMIT_S)

    async def sleep(self, level: int) -> None:
        """Free GPU memory while the trainer steps on the same GPU."""
        await self._ask("sleep", self._actor.sleep.remote(level), self.spec.refit_timeout_s)

    async def wake(self) -> None:
        """Take the memory back; a refit (needed after level 2) or a resume comes next."""
        await self._ask("wake", self._actor.wake.remote(), self.spec.refit_timeout_s)

    async def weights_digest(self) -> str:
        """Digest over the tensors that it serves."""
        return await self._ask("weights_digest", self._actor.weights_digest.remote(), self.spec.refit_timeout_s)

    async def health(self, limit_s: float = _CONTROL_LIMIT_S) -> EngineHealth:
        """A sign of life, or EngineError."""
        return await self._ask("health", self._actor.health.remote(), limit_s)

    async def probe(self, limit_s: float) -> None:
        """Sample one token; EngineError when none comes within the limit."""
        sampling = Sampling(max_new_tokens=1, temperature=0.0)
        await self._ask("probe", self._actor.generate.remote(f"probe-{uuid.uuid4().hex}", [0], sampling), limit_s)

    async def stop(self) -> None:
        """Stop the engine and end its process; a dead one is fine."""
        import ray

        try:
            await self._ask("stop", self._actor.stop.remote(), _CONTROL_LIMIT_S)
        except EngineError:
            pass
        finally:
            ray.kill(self._actor)

    def kill(self) -> None:
        """End its process at once."""
        import ray

        ray.kill(self._actor)

    async def _ask(self, what: str, reference: Awaitable[T], limit_s: float) -> T:
        try:
            return await asyncio.wait_for(_told(self.name, reference), limit_s)
        except TimeoutError as error:
            raise EngineError(f"engine {self.name}: {what} was not answered within {limit_s:g} s") from error

    def _listen(self) -> asyncio.Future[None]:
        """Count one waiting call in, and see to it that somebody listens to the engine while calls wait."""
        self._num_waiting += 1
        if self._silence is None or self._silence.done() or self._beat is None or self._beat.done():
            self._silence = asyncio.get_running_loop().create_future()
            self._silence.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._beat = asyncio.create_task(self._watch(self._silence), name=f"listen to {self.name}")
        return self._silence

    async def _watch(self, silence: asyncio.Future[None]) -> None:
        """Set an error on `silence` once the engine is dead or has sampled nothing for too long; ends when nobody waits."""
        limit_s = self.spec.request_timeout_s
        sampled, heard = -1, time.monotonic()
        while self._num_waiting > 0:
            await asyncio.sleep(min(_BEAT_S, limit_s / 4))
            if self._num_waiting == 0:
                return
            try:
                health = await self.health(limit_s)
            except EngineError as error:
                silence.set_exception(error)
                return
            except Exception as error:  # Ray refuses a call to an actor that it no longer knows with a bare Exception
                silence.set_exception(EngineError(f"engine {self.name} cannot be asked: {error}"))
                return
            if health.num_sampled != sampled or health.is_paused or health.num_in_flight == 0:
                sampled, heard = health.num_sampled, time.monotonic()
            elif time.monotonic() - heard > limit_s:
                silence.set_exception(
                    EngineError(
                        f"engine {self.name} (pid {health.pid}) holds {health.num_in_flight} calls and sampled nothing for "
                        f"vllm.request_timeout_s={limit_s:g}; it hangs"
                    )
                )
                return


def _rollout_of(request_id: str) -> str:
    """The rollout that a call belongs to: group, member and try begin its name."""
    return "/".join(request_id.split("/", 3)[:3])


async def _told(name: str, reference: Awaitable[T]) -> T:
    """The answer, with Ray's errors turned into ours."""
    import ray

    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MoltError):
            raise cause from error
        raise EngineError(f"engine {name}: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.RayError as error:
        raise EngineError(f"engine {name} is gone: {type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
