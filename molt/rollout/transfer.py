"""The trainer's side of a refit over CUDA: handles of tensors on the same GPU (ipc), or a broadcast to other GPUs (nccl).

    ipc  : offer = offer_ipc(tensors)                     keep it until every engine has taken offer.source
    nccl : sender = NcclSender(engines)                   for one set of engines; another one when an engine was replaced
           source = sender.source(facts, version)         names, shapes, digests; nothing moves yet
           Fleet.refit(source, send=...)                  broadcast (sender.send of tensors as they come) and receipt run at the same time

The engines' side is vLLM's own weight transfer engine; see molt.rollout.vllm_weights.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import chain
from queue import Full, Queue
from typing import Any

import torch

from molt.errors import RefitError
from molt.rollout.engine import WeightSource
from molt.rollout.weights import TensorFacts, digest_tensors, size_bytes

_BUFFER_BYTES = 1 << 30
_NUM_BUFFERS = 2
_NUM_WAITING = 16
"""Tensors that are gathered ahead of the broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Weights that engines on the same GPU may read in place, as long as this object lives."""

    source: WeightSource
    tensors: dict[str, torch.Tensor]


def offer_ipc(tensors: Mapping[str, torch.Tensor], *, policy_version: int, digests: Mapping[str, str] | None = None) -> Offer:
    """CUDA handles of all tensors; digests, where they are known. RefitError for a tensor that is not on a GPU: it has no handle."""
    from torch.multiprocessing.reductions import reduce_tensor

    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    for name, tensor in held.items():
        if not tensor.is_cuda:
            raise RefitError(f"{name} lies on {tensor.device}, transport=ipc needs it on a GPU; publish with transport file")
    handles = [{str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]} for tensor in held.values()]
    update = {**_description(held), "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
    source = WeightSource(
        policy_version=policy_version,
        transport="ipc",
        digests=digest_tensors(held) if digests is None else dict(digests),
        options={"update": base64.b64encode(pickle.dumps([update])).decode(), "size_bytes": str(size_bytes(held.values()))},
    )
    return Offer(source=source, tensors=held)


def _description(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


class NcclSender:
    """Rank 0 of a process group of the trainer and every worker of some engines.

        __init__ --> the port is bound and held, so that nobody takes it before the engines come
        source   --> engines learn the place;  send --> they meet, once, and the tensors go round
        a broadcast that fails or passes its limit --> the group is broken off; make another one

    A broadcast with a dead member never ends by itself, so it runs in a thread that is left behind.
    """

    def __init__(self, engines: Sequence[str], *, gpus_per_engine: int, host: str, limit_s: float) -> None:
        """host: an address of this machine that the engines reach. limit_s: longest broadcast."""
        self.engines = tuple(engines)
        self._gpus_per_engine = gpus_per_engine
        self._host = host
        self._limit_s = limit_s
        self._socket: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen()
        self._port = int(self._socket.getsockname()[1])
        self._group: Any = None
        self._facts: dict[str, TensorFacts] = {}
        self._version = 0
        self.is_broken = False
        """A broadcast went wrong: its members wait for each other in vain."""

    @property
    def world_size(self) -> int:
        """The trainer and all workers of all engines."""
        return 1 + len(self.engines) * self._gpus_per_engine

    @property
    def place(self) -> tuple[str, int]:
        """Host and port where the group meets."""
        return self._host, self._port

    def source(self, facts: Mapping[str, TensorFacts], *, policy_version: int) -> WeightSource:
        """Describe tensors that the next `send` broadcasts, in their order."""
        self._facts, self._version = dict(facts), policy_version
        packing = {"packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES, "packed_num_buffers": _NUM_BUFFERS}
        place = {"master_address": self._host, "master_port": self._port, "world_size": self.world_size}
        init = {name: {**place, **packing, "rank_offset": 1 + number * self._gpus_per_engine} for number, name in enumerate(self.engines)}
        update = {
            "names": list(facts),
            "dtype_names": [fact.dtype for fact in facts.values()],
            "shapes": [list(fact.shape) for fact in facts.values()],
        }
        return WeightSource(
            policy_version=policy_version,
            transport="nccl",
            digests={name: fact.digest for name, fact in facts.items()},
            options={
                "init": json.dumps(init),
                "update": json.dumps({**update, **packing}),
                "size_bytes": str(sum(fact.size_bytes for fact in facts.values())),
            },
        )

    def source_by(self, other: NcclSender) -> WeightSource:
        """Describe the same tensors, to be sent by another group."""
        return other.source(self._facts, policy_version=self._version)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast what `source` described; the engines must be receiving meanwhile. RefitError when they did not get it in time.

        tensors: taken to their end whatever becomes of the broadcast, since other ranks may take part in making them.
        """
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        errors: list[BaseException] = []
        waiting: Queue[tuple[str, torch.Tensor] | None] = Queue(_NUM_WAITING)

        def body() -> None:
            try:
                self._send(iter(waiting.get, None), device)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="broadcast", daemon=True)
        thread.start()
        until = time.monotonic() + self._limit_s
        for item in chain(tensors, [None]):
            if item is not None and item[1].is_cuda:
                torch.cuda.current_stream(device).synchronize()  # the thread reads it on streams of its own
            while thread.is_alive() and time.monotonic() < until:
                try:
                    waiting.put(item, timeout=0.1)
                    break
                except Full:
                    continue
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive() or errors:
            self.close()
            why = f"{type(errors[0]).__name__}: {errors[0]}" if errors else f"it did not end within vllm.refit_timeout_s={self._limit_s:g}"
            raise RefitError(f"the broadcast to {', '.join(self.engines)} broke off: {why}")

    def meet(self) -> Any:
        """vLLM's group for metadata, over the held port; waits for every worker."""
        from vllm.distributed.utils import StatelessProcessGroup

        held, self._socket = self._socket, None
        assert held is not None, "a group meets once"
        return StatelessProcessGroup.create(
            self._host, self._port, 0, self.world_size, store_timeout=math.ceil(self._limit_s), listen_socket=held
        )

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]], device: int) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(device)
        if self._group is None:
            with _same_nccl_settings():
                self._group = PyNcclCommunicator(self.meet(), device=device)
        packed_nccl_broadcast_producer(
            iterator=tensors,
            group=self._group,
            src=0,
            post_iter_func=_taken,
            buffer_size_bytes=_BUFFER_BYTES,
            num_buffers=_NUM_BUFFERS,
        )
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Give up port and group; what waits in it is broken off."""
        self.is_broken = True
        if self._socket is not None:
            self._socket.close()
        if self._group is not None:
            self._group.destroy()  # aborts; it waits a few seconds at most


def _taken(item: tuple[str, torch.Tensor]) -> torch.Tensor:
    """The tensor, whose memory is not given to another before the stream that packs it is done with it."""
    item[1].record_stream(torch.cuda.current_stream())
    return item[1]


def _same_nccl_settings() -> AbstractContextManager[Any]:
    """Newer releases of vLLM pin NCCL settings of their own and lift them for groups that are shared with others; both sides must."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:
        return nullcontext()
    return unpinned_nccl_env()


def only_known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a dataclass of this release of vLLM has: packing moved between its messages."""
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in known}
