"""The vLLM engine: AsyncLLM behind the protocol, the same code for CUDA and for the CPU build.

    generate --> gate (shut from pause to resume) --> vLLM core: sampling, batching, caches --> output --> Generation
    pause   --> gate shut --> no call is being added --> core paused --> output handler at rest
    refit   --> names and shapes --> every byte against its digest --> load --> digests of what the model was handed --> proof
                --> caches dropped, marks set: tokens from here on carry the new version
    resume  --> core goes on --> gate open

What a refit proves: the bytes that each worker read are the bytes sent, and its model was handed each of them; parameters that
vLLM keeps as they were sent are compared byte for byte in place (the share of bytes is `provable_share`), the rest by the
log-probs of the contract test. A refit that fails after loading began puts the last weights back, or refuses calls from then on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from molt.data.images import Image
from molt.errors import EngineError, MoltError, RefitError
from molt.rollout.engine import EngineInfo, Generation, RefitReport, Sampling, WeightSource, nothing_sampled
from molt.rollout.lifeline import name_engine
from molt.rollout.vllm_calls import Call, Handler, can_leave_routes_out, prompt_of, sampling_params, to_generation
from molt.rollout.vllm_counts import EngineCounts, stat_logger
from molt.rollout.vllm_settings import engine_arguments
from molt.rollout.vllm_weights import VllmWeights

_SETTLE_S = 30.0


class VllmEngine:
    """Engine over vLLM. See molt.rollout.engine.Engine for the contract."""

    def __init__(
        self,
        model_path: str,
        *,
        name: str = "vllm-0",
        max_len: int = 4096,
        dtype: str = "float32",
        policy_version: int = 0,
        is_cuda: bool = False,
        transport: str = "file",
        kv_on_refit: str = "recompute",
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        gpu_memory_utilization: float = 0.6,
        max_num_seqs: int = 64,
        seed: int = 0,
        seeds_calls: bool = False,
        enforce_eager: bool = True,
        is_compiled: bool = True,
        kv_cache_space_gib: float | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        num_speculative_tokens: int = 0,
        enable_sleep: bool = False,
        capture_routes: bool = False,
        quantization: str | None = None,
        is_counted: bool = False,
        max_images: int = 0,
        is_vision_frozen: bool = True,
    ) -> None:
        """quantization: "fp8" quantizes the loaded weights, on CUDA. is_counted: keep `counts`. max_images: most in a prompt, of a model
        that takes any. is_vision_frozen: refits leave what makes features of images as it is."""
        self._model_path = model_path
        self._name = name
        self._version = policy_version
        self._is_cuda = is_cuda
        self._kv_on_refit = kv_on_refit
        self._capture_routes = capture_routes
        self._seeds_calls = seeds_calls
        self._arguments = engine_arguments(
            model_path,
            max_len=max_len,
            dtype=dtype,
            is_cuda=is_cuda,
            transport=transport,
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            seed=seed,
            enforce_eager=enforce_eager,
            is_compiled=is_compiled,
            kv_cache_space_gib=kv_cache_space_gib,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            num_speculative_tokens=num_speculative_tokens,
            enable_sleep=enable_sleep,
            capture_routes=capture_routes,
            quantization=quantization,
            max_images=max_images,
        )
        self._is_vision_frozen = is_vision_frozen
        self._picture = lru_cache(maxsize=64)(Image.decoded)
        self.counts: EngineCounts | None = EngineCounts() if is_counted else None
        self._is_speculative = num_speculative_tokens > 0
        self._llm: Any = None
        self._handler: Handler | None = None
        self._weights: VllmWeights | None = None
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()
        self._gate = asyncio.Condition()
        self._is_open = True
        self._num_adding = 0
        self._num_finished = 0
        self._is_paused = False
        self._is_cache_asleep = False
        self._unfit: str | None = None
        """Why it may not sample: weights half loaded, dropped in sleep, or stopped."""

    async def start(self) -> EngineInfo:
        """Start vLLM; the loop stands still meanwhile. The environment of molt.rollout.vllm_settings must be set before."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            name_engine()
            loggers = None if self.counts is None else [stat_logger(self.counts)]
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), stat_loggers=loggers)
        except Exception as error:
            raise EngineError(f"engine {self._name}: vLLM does not start: {type(error).__name__}: {error}") from error
        self._handler = Handler(self._llm.engine_core)  # before the handler's task first runs
        self._weights = VllmWeights(self._llm, name=self._name, model_path=self._model_path)
        await self._weights.start()
        await self._weights.ask("molt_draw_apart", self._arguments["seed"])
        await self._label()
        if self._is_speculative and not self._is_cuda:
            await self._weights.ask("molt_mend_speculation")
        if self._capture_routes and not self._is_cuda:
            await self._weights.ask("molt_capture_routes", int(self._llm.model_config.hf_text_config.num_experts_per_tok))
        return EngineInfo(
            name=self._name,
            kind="vllm",
            policy_version=self._version,
            max_len=self._max_len,
            vocab_size=self._vocab_size,
            weights_digest=self._weights.digest,
        )

    @property
    def _max_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def _vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def death(self) -> str | None:
        """Why it never samples again: a core is gone."""
        return None if self._handler is None else self._handler.death

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since start, as far as the output handler knows."""
        return self._num_finished + sum(self._counts().values())

    # Model calls.

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Image] = ()) -> Generation:
        """Sample a continuation; a request_id that is running is joined."""
        ids: list[int] = np.asarray(prompt_ids, np.int64).tolist()
        call = self._calls.get(request_id)
        if call is None:
            self._refuse(request_id, ids, sampling)
            vllm_id = f"{request_id}#{next(self._numbers)}"
            call = Call(request_id=request_id, vllm_id=vllm_id, prompt_ids=ids, sampling=sampling, images=tuple(images))
            self._calls[request_id] = call
            call.task = asyncio.create_task(self._run(call), name=request_id)
        elif call.prompt_ids != ids or call.sampling != sampling or call.images != tuple(images):
            raise EngineError(f"request {request_id} is running with another prompt or sampling; use a new request_id")
        assert call.task is not None, "a known call has a task"
        return await asyncio.shield(call.task)

    def _refuse(self, request_id: str, ids: list[int], sampling: Sampling) -> None:
        if self._llm is None or self._unfit is not None:
            raise EngineError(f"engine {self._name} cannot serve {request_id}: {self._unfit or 'stopped or never started'}")
        if not ids or min(ids) < 0 or max(ids) >= self._vocab_size:
            raise EngineError(f"request {request_id}: a prompt needs ids within [0, {self._vocab_size}), got {len(ids)} ids")
        if len(ids) >= self._max_len or sampling.max_new_tokens < 1:
            raise EngineError(
                f"request {request_id}: prompt of {len(ids)} ids and max_new_tokens={sampling.max_new_tokens} leave no room "
                f"in max_len={self._max_len}; end the rollout as truncated or raise data.max_len"
            )

    async def _run(self, call: Call) -> Generation:
        try:
            async with self._gate:
                await self._gate.wait_for(lambda: self._is_open or call.is_aborted or self._unfit is not None)
            if self._unfit is not None and not call.is_aborted:
                raise EngineError(f"engine {self._name} cannot serve {call.request_id}: {self._unfit}")
            if call.is_aborted:
                return nothing_sampled()
            output = await self._sample(call)
            self._num_finished += len(output.outputs[0].token_ids)
            routes = await self._routes(call, output) if self._capture_routes else None
            return to_generation(call, output, routes, is_cache_kept=self._kv_on_refit == "keep")
        except MoltError:
            raise
        except Exception as error:
            failed = EngineError(f"engine {self._name}, request {call.request_id}: {type(error).__name__}: {error}")
            failed.n_sampled = self._counts().get(call.request_id, 0)
            raise failed from error
        finally:
            del self._calls[call.request_id]

    async def _sample(self, call: Call) -> Any:
        """The finished output of vLLM."""
        call.marks = [(0, self._version)]
        self._num_adding += 1
        try:
            params = sampling_params(call, self._max_len, is_delta=self._is_delta(call.sampling), is_seeded=self._seeds_calls)
            collector = await self._llm.add_request(call.vllm_id, prompt_of(call, self._picture), params)
            call.core_id = collector.request_id
        finally:
            self._num_adding -= 1
        if call.is_aborted:
            await self._llm.abort(call.vllm_id)
        while True:
            output = collector.get_nowait() or await collector.get()
            if output.finished:
                return output

    def _is_delta(self, sampling: Sampling) -> bool:
        """Whether vLLM itself leaves out the routes that are known; of releases that cannot, all of them come and are cut here."""
        return self._is_cuda and self._capture_routes and sampling.routes_from > 0 and can_leave_routes_out()

    async def _routes(self, call: Call, output: Any) -> np.ndarray | None:
        if self._is_cuda:
            given = output.outputs[0].routed_experts
            first = 0 if self._is_delta(call.sampling) else call.sampling.routes_from
            return None if given is None else np.asarray(given)[first:].astype(np.int16)
        answers = await self._weights_of.ask("molt_take_routes", call.core_id)
        answer = max(answers, key=lambda found: found["shape"][0])  # the core that ran it knows it
        return np.frombuffer(answer["data"], dtype=np.int16).reshape(answer["shape"])[call.sampling.routes_from :]

    async def abort(self, request_id: str) -> None:
        """End one request early; an unknown id is fine."""
        call = self._calls.get(request_id)
        if call is not None:
            await self._cut([call])

    async def _cut(self, calls: list[Call]) -> None:
        async with self._gate:
            for call in calls:
                call.is_aborted = True
            self._gate.notify_all()
        for call in calls:
            if call.core_id is not None:
                await self._llm.abort(call.vllm_id)

    def _counts(self) -> dict[str, int]:
        """Tokens of each running call that the output handler has taken in; a finished call is not among them."""
        states = {} if self._llm is None else self._llm.output_processor.request_states
        known = {call.request_id: states.get(call.core_id) for call in self._calls.values() if call.core_id is not None}
        return {name: len(state.detokenizer.output_token_ids) for name, state in known.items() if state is not None}

    # Pause, refit, resume.

    async def pause(self, mode: str = "keep") -> int:
        """Hold generation between tokens; returns the requests in flight. Mode abort ends them."""
        if mode not in ("keep", "abort"):
            raise EngineError(f"pause mode={mode}, known are keep and abort")
        self._is_open = False
        try:
            in_flight = await self._hold()
        except BaseException:
            await self.resume()
            raise
        self._is_paused = True
        if mode == "abort":
            await self._cut(in_flight)
        return len(in_flight)

    async def _hold(self) -> list[Call]:
        """Pause the core and wait until everything it sent has been taken in; returns the calls in flight."""
        assert self._handler is not None, "start comes before pause"
        try:
            async with asyncio.timeout(_SETTLE_S):
                while self._num_adding:
                    await asyncio.sleep(0.001)
                await self._llm.pause_generation(mode="keep", clear_cache=False)
        except TimeoutError as error:
            raise EngineError(f"engine {self._name} did not pause within {_SETTLE_S:g} s") from error
        in_flight = list(self._calls.values())
        if in_flight:
            await self._handler.settle(_SETTLE_S)
        return in_flight

    async def refit(self, source: WeightSource) -> RefitReport:
        """Take new weights; RefitError leaves the old ones serving, or the engine refusing calls if it cannot put them back."""
        if not self._is_paused:
            raise EngineError(f"engine {self._name}: refit needs a pause first")
        begin = time.perf_counter()
        times = await self._weights_of.take(source, on_unfit=self._set_unfit)
        self._unfit = None
        dropped = time.perf_counter()
        caches = await self._drop_caches()
        counts = self._counts()
        self._version = source.policy_version
        for call in self._calls.values():
            if call.request_id in counts:
                call.marks.append((counts[call.request_id], self._version))
        await self._label()
        return RefitReport(
            engine=self._name,
            policy_version=self._version,
            weights_digest=self._weights_of.digest,
            load_s=times.load_s + time.perf_counter() - dropped,
            verify_s=dropped - begin - times.load_s,
            num_in_flight=len(self._calls),
            caches=caches,
        )

    def _set_unfit(self, why: str) -> None:
        self._unfit = why

    async def _drop_caches(self) -> tuple[str, ...]:
        """Drop every entry made by old weights; running requests make theirs again, unless kv_on_refit is keep. Returns which."""
        dropped: list[str] = []
        if self._kv_on_refit == "recompute":
            is_dropped = await self._llm.reset_prefix_cache(reset_running_requests=True)
            if is_dropped is False:
                self._unfit = "its cache could not be dropped at a refit"
                raise RefitError(f"engine {self._name}: vLLM did not drop its cache; tokens would attend to entries of old weights")
            dropped.append("kv")
        if self._llm.model_config.is_multimodal_model and not self._is_vision_frozen:
            await self._llm.reset_encoder_cache()
            dropped.append("images")
        return tuple(dropped)

    async def _label(self) -> None:
        """Tell newer releases of vLLM the version, so that their own account can be compared with ours."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(self._version))

    async def resume(self) -> None:
        """Go on; EngineError while the weights in place are no version's, and calls in flight wait for the next refit."""
        if self._unfit is not None:
            raise EngineError(f"engine {self._name} cannot resume: {self._unfit}")
        if self._is_cache_asleep:
            await self._llm.wake_up(tags=["kv_cache"])
            self._is_cache_asleep = False
        await self._llm.resume_generation()
        self._is_paused = False
        async with self._gate:
            self._is_open = True
            self._gate.notify_all()

    @property
    def _weights_of(self) -> VllmWeights:
        assert self._weights is not None, "start comes first"
        return self._weights

    @property
    def provable_share(self) -> float:
        """Share of the weights' bytes that a refit compares in place."""
        return self._weights_of.provable_share

    async def weights_digest(self) -> str:
        """Digest over the tensors that were loaded last."""
        return self._weights_of.digest

    async def sleep(self, level: int) -> None:
        """Free GPU memory while a trainer on the same GPU steps: 1 keeps the weights in host memory, 2 drops them until the next refit."""
        if not self._is_paused:
            await self.pause("keep")
        await self._llm.sleep(level=level, mode="keep")
        self._is_cache_asleep = True
        if level >= 2:
            self._unfit = "its weights were dropped in sleep; it needs a refit"

    async def wake(self) -> None:
        """Take back the memory of the weights. That of the cache follows at resume: vLLM goes on as soon as both are there."""
        await self._llm.wake_up(tags=["weights"])

    async def stop(self) -> None:
        """End requests as abort, and vLLM's processes."""
        if self._llm is None:
            return
        self._unfit = self._unfit or "stopped"
        await self._cut(list(self._calls.values()))
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_SETTLE_S)
        self._llm.shutdown()
        self._llm = self._handler = self._weights = None
