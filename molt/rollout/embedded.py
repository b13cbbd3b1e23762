"""The embedded engine: a small torch engine of the protocol, in one thread, with continuous batching.

    asyncio side                         engine thread (alone touches model, cache and requests)
    generate -> command ---------------> Batcher.accept -> a slot is free -> prefill -> decode, one id per pass -> future
    pause / refit / resume -> command -> run between two passes; paused: nothing but commands is taken
    stop -> command -------------------> requests in flight end as abort, the thread ends

A command that waits for a pass is bounded by that pass; a pass that fails ends the engine and tells every waiter why.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from molt.data.images import Image
from molt.errors import EngineError
from molt.rollout.batcher import Batcher
from molt.rollout.decoder import SlotDecoder
from molt.rollout.engine import EngineInfo, Generation, RefitReport, Sampling, WeightSource

T = TypeVar("T")


class EmbeddedEngine:
    """Engine over a Hugging Face causal LM in this process. See molt.rollout.engine.Engine for the contract."""

    def __init__(
        self,
        model_path: str,
        *,
        name: str = "embedded-0",
        max_len: int = 4096,
        max_num_seqs: int = 64,
        kv_on_refit: str = "recompute",
        dtype: str = "float32",
        device: str = "cpu",
        policy_version: int = 0,
    ) -> None:
        self._model_path = model_path
        self._name = name
        self._max_len = max_len
        self._max_num_seqs = max_num_seqs
        self._kv_on_refit = kv_on_refit
        self._dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        self._first_version = policy_version
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._is_stopped = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._batch: Batcher | None = None

    # The protocol, called from asyncio.

    async def start(self) -> EngineInfo:
        """Load the model in the engine thread; returns when it can generate."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        return await self._call(self._load)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """Sample a continuation; a request_id that is running is joined."""
        ids = [int(token) for token in prompt_ids]
        future = await self._call(lambda: self._batcher.accept(request_id, ids, sampling, images))
        return await asyncio.shield(asyncio.wrap_future(future))

    async def abort(self, request_id: str) -> None:
        """End one request early; an unknown id is fine."""
        await self._call(lambda: self._batcher.abort(request_id))

    async def pause(self, mode: str = "keep") -> int:
        """Hold generation between passes; returns the requests in flight."""
        return await self._call(lambda: self._batcher.pause(mode))

    async def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights while paused."""
        return await self._call(lambda: self._batcher.refit(source))

    async def resume(self) -> None:
        """Go on."""
        await self._call(lambda: self._batcher.resume())

    async def weights_digest(self) -> str:
        """Digest over the tensors that it serves."""
        return await self._call(lambda: self._batcher.decoder.weights_digest())

    async def stop(self) -> None:
        """End requests as abort, and the thread."""
        if self._thread is None or self._is_stopped or self._failure is not None:
            return
        await self._call(self._stop)
        await asyncio.to_thread(self._thread.join, 30.0)
        self._batch = None

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since start."""
        return 0 if self._batch is None else self._batch.num_sampled

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command in the engine thread, between two passes."""
        future: Future[T] = Future()
        with self._wake:
            if self._thread is None or self._is_stopped or self._failure is not None:
                raise EngineError(f"engine {self._name} is not running: {self._failure or 'stopped or never started'}")
            self._commands.append((command, future))
            self._wake.notify()
        return await asyncio.shield(asyncio.wrap_future(future))

    # The engine thread.

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                with self._wake:
                    self._wake.wait_for(lambda: bool(self._commands) or self._has_work())
                    commands = list(self._commands)
                    self._commands.clear()
                for command, future in commands:
                    _answer(command, future)
                if not self._is_stopped and self._has_work():
                    self._batcher.step()
        except BaseException as error:
            self._fail(error)

    def _has_work(self) -> bool:
        return self._batch is not None and self._batch.has_work

    @property
    def _batcher(self) -> Batcher:
        assert self._batch is not None, "the model is loaded before any other command"
        return self._batch

    def _load(self) -> EngineInfo:
        decoder = SlotDecoder(self._model_path, dtype=self._dtype, device=self._device, max_len=self._max_len)
        self._batch = Batcher(
            decoder, name=self._name, max_num_seqs=self._max_num_seqs, kv_on_refit=self._kv_on_refit, policy_version=self._first_version
        )
        return EngineInfo(
            name=self._name,
            kind="embedded",
            policy_version=self._first_version,
            max_len=decoder.max_len,
            vocab_size=decoder.vocab_size,
            weights_digest=decoder.weights_digest(),
        )

    def _stop(self) -> None:
        self._batcher.close()
        self._is_stopped = True

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            left = [future for _, future in self._commands]
            self._commands.clear()
        told = EngineError(f"engine {self._name} failed in a forward pass: {type(error).__name__}: {error}")
        for future in left:
            future.set_exception(told)
        if self._batch is not None:
            self._batch.fail(told)


def _answer(command: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(command())
    except Exception as error:
        future.set_exception(error)
