"""Weights of a vLLM engine: what it holds, how new ones come in, and what proves that they did.

    file ... every worker's bytes are checked against their digests, then loaded: a bad file changes nothing
    ipc .... CUDA handles of the trainer's tensors, through vLLM's own transfer engine
    nccl ... a broadcast by the trainer that runs at the same time, through vLLM's own transfer engine

On ipc and nccl the digests are those of the tensors as they were handed to the model, so a difference is found after loading: the
engine then refuses calls until a refit succeeds. What breaks off before the first of them leaves the old weights as they were.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from molt.errors import EngineError, RefitError
from molt.rollout.engine import WeightSource
from molt.rollout.transfer import only_known
from molt.rollout.weights import check_names, check_shapes, digest_tensors, draft_names, model_digest, read_tensors, tensor_shapes

_TIED = ("lm_head.weight",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds of one refit inside the workers."""

    load_s: float


class VllmWeights:
    """The weights that all workers of one engine hold."""

    def __init__(self, llm: Any, *, name: str, model_path: str) -> None:
        self._llm = llm
        self._name = name
        self._path = model_path
        """File or folder that the workers loaded last."""
        self._digests: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._provable: set[str] = set()
        self._draft: list[str] = []
        """Names in the model folder that only a draft head uses: never sent, never loaded again."""
        self._joined: str | None = None
        """The process group of the trainer that the workers are in."""
        self.provable_share = 0.0
        """Share of the weights' bytes that a refit compares in place."""

    @property
    def digest(self) -> str:
        """model_digest over the tensors that were loaded last."""
        return model_digest(self._digests)

    async def start(self) -> None:
        """Learn names, shapes and digests of the model's files, and which tensors the workers keep as they were sent."""
        shapes = tensor_shapes(self._path)
        self._draft = sorted(draft_names(shapes, int(self._llm.model_config.hf_text_config.num_hidden_layers)))
        self._shapes = {name: shape for name, shape in shapes.items() if name not in self._draft}
        self._digests = await asyncio.to_thread(lambda: digest_tensors(dict(read_tensors(self._path, without=self._draft))))
        answers = await self.ask("molt_prove", self._path, self._draft)
        self._provable = set.intersection(*(set(answer["names"]) for answer in answers))
        self.provable_share = min(float(answer["share"]) for answer in answers)

    async def ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of RefitExtension on every worker; RefitError with the first worker's error."""
        answers = await self._of_every_core(method, args)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RefitError(f"engine {self._name}, worker {rank}, {method}: {answer['error']}")
        return answers

    async def _of_every_core(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The answers of the workers of all cores. vLLM's own call reaches data-parallel cores too and answers with those of the first."""
        client = self._llm.engine_core
        cores = getattr(client, "core_engines", ())
        if len(cores) < 2:
            return await self._llm.collective_rpc(method, args=args)
        asked = (client._call_utility_async("collective_rpc", method, None, args, {}, engine=core) for core in cores)
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def take(self, source: WeightSource, *, on_unfit: Callable[[str], None]) -> LoadTimes:
        """Load new weights into every worker and compare; calls on_unfit when the workers are left with neither old nor new."""
        check_names(self._shapes, source.digests, tied=_TIED)
        if source.transport == "file":
            return await self._take_file(source, on_unfit)
        if source.transport in ("ipc", "nccl"):
            return await self._take_transfer(source, on_unfit)
        raise RefitError(f"transport={source.transport}, known are file, ipc and nccl")

    async def _take_file(self, source: WeightSource, on_unfit: Callable[[str], None]) -> LoadTimes:
        path = str(source.path)
        check_shapes(self._shapes, tensor_shapes(path))
        await self.ask("molt_check", path, source.digests)
        begin = time.perf_counter()
        try:
            answers = await self.ask("molt_load", path, self._draft)
            load_s = time.perf_counter() - begin
            self._compare(source, answers)
            await self._prove(path)
        except RefitError as error:
            await self._put_back(str(error), on_unfit)
            raise
        self._path, self._digests = path, dict(source.digests)
        return LoadTimes(load_s=load_s)

    async def _take_transfer(self, source: WeightSource, on_unfit: Callable[[str], None]) -> LoadTimes:
        """Through vLLM's transfer engine; its workers' models are tapped for digests."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        begin = time.perf_counter()
        init = _init(source, self._name)
        group = f"{init.get('master_address')}:{init.get('master_port')}"
        is_tapped = False
        try:
            if self._joined != group:
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
                self._joined = group
            await self.ask("molt_tap_open")
            is_tapped = True
            await self._llm.start_weight_update()
            for chunk in _updates(source):
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=chunk))
            await self._llm.finish_weight_update()
            load_s = time.perf_counter() - begin
            answers = await self.ask("molt_tap_close")
            self._compare(source, answers)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if await self._drop(told) and is_tapped:
                on_unfit(f"a refit by {source.transport} broke off ({told}); it needs another one")
            if isinstance(error, RefitError):
                raise
            raise RefitError(f"engine {self._name}: {told}") from error
        self._digests = dict(source.digests)
        return LoadTimes(load_s=load_s)

    def _compare(self, source: WeightSource, answers: list[dict[str, Any]]) -> None:
        """RefitError unless every worker's model was handed exactly what was sent."""
        for rank, answer in enumerate(answers):
            got: dict[str, str] = answer["digests"]
            check_names(source.digests, got)
            wrong = [name for name, digest in got.items() if digest != source.digests[name]]
            if wrong:
                raise RefitError(
                    f"engine {self._name}, worker {rank}: {wrong[0]} of version {source.policy_version} arrived as "
                    f"{got[wrong[0]]}, sent as {source.digests[wrong[0]]} ({len(wrong)} tensors differ)"
                )

    async def _prove(self, path: str) -> None:
        """RefitError unless each tensor that can be compared in place is there."""
        for rank, answer in enumerate(await self.ask("molt_prove", path, self._draft)):
            missing = sorted(self._provable - set(answer["names"]))
            if missing:
                raise RefitError(
                    f"engine {self._name}, worker {rank}: {missing[0]} was handed over and is not in place ({len(missing)} tensors)"
                )

    async def _drop(self, told: str) -> int:
        """Take away what a refit left that broke off; returns the tensors that had reached a model. EngineError when it cannot be done."""
        try:
            return max(answer["num_passed"] for answer in await self.ask("molt_drop_update"))
        except Exception as error:
            raise EngineError(f"engine {self._name}: a refit broke off ({told}) and cannot be taken back: {error}") from error

    async def _put_back(self, told: str, on_unfit: Callable[[str], None]) -> None:
        """Load the last good weights again."""
        await self._drop(told)
        try:
            answers = await self.ask("molt_load", self._path, self._draft)
            if any(answer["digests"] != self._digests for answer in answers):
                raise RefitError(f"{self._path} no longer holds the last weights")
        except RefitError as error:
            on_unfit(f"a refit broke off and the last weights could not be put back ({error}); it needs another refit")


def _init(source: WeightSource, name: str) -> dict[str, Any]:
    """What this engine is told of the process group; nothing is needed for ipc."""
    if source.transport == "ipc":
        return {}
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    groups = json.loads(source.options["init"])
    if name not in groups:
        raise RefitError(f"engine {name} is not in the trainer's process group ({', '.join(groups)}); make the group again")
    return only_known(NCCLWeightTransferInitInfo, groups[name])


def _updates(source: WeightSource) -> list[dict[str, Any]]:
    """What each update_weights call is given: JSON for nccl; for ipc a pickle, since CUDA handles are tuples of bytes."""
    if source.transport == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        return [only_known(NCCLWeightTransferUpdateInfo, json.loads(source.options["update"]))]
    return list(pickle.loads(base64.b64decode(source.options["update"])))
