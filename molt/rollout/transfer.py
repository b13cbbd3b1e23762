"""The trainer's side of a refit over CUDA: handles of tensors on the same GPU (ipc), or a broadcast to other GPUs (nccl).

    ipc  : offer = offer_ipc(tensors)                     keep it until every engine has taken offer.source
    nccl : sender = NcclSender(engines)                   once
           source = sender.source(tensors, version)       names, shapes, digests; nothing moves yet
           Fleet.refit(source, send=sender.send)          broadcast and receipt run at the same time

The engines' side is vLLM's own weight transfer engine; see molt.rollout.vllm_weights.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from molt.errors import RefitError
from molt.rollout.engine import WeightSource
from molt.rollout.weights import digest_tensors, size_bytes

_BUFFER_BYTES = 1 << 30
_NUM_BUFFERS = 2


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
    """Rank 0 of a process group of the trainer and every worker of every engine."""

    def __init__(self, engines: Sequence[str], *, gpus_per_engine: int, host: str | None = None) -> None:
        self._engines = list(engines)
        self._gpus_per_engine = gpus_per_engine
        self._host = host or socket.gethostbyname(socket.gethostname())
        self._port = _free_port()
        self._group: Any = None
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def _world_size(self) -> int:
        return 1 + len(self._engines) * self._gpus_per_engine

    def source(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digests: Mapping[str, str] | None = None) -> WeightSource:
        """Describe tensors that the next `send` broadcasts; digests, where they are known already."""
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        packing = {"packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES, "packed_num_buffers": _NUM_BUFFERS}
        place = {"master_address": self._host, "master_port": self._port, "world_size": self._world_size}
        init = {name: {**place, **packing, "rank_offset": 1 + number * self._gpus_per_engine} for number, name in enumerate(self._engines)}
        return WeightSource(
            policy_version=policy_version,
            transport="nccl",
            digests=digest_tensors(self._tensors) if digests is None else dict(digests),
            options={
                "init": json.dumps(init),
                "update": json.dumps({**_description(self._tensors), **packing}),
                "size_bytes": str(size_bytes(self._tensors.values())),
            },
        )

    async def send(self) -> None:
        """Broadcast what `source` described; returns when every engine has received it. The engines must be receiving meanwhile."""
        await asyncio.to_thread(self._send, torch.cuda.current_device())

    def _send(self, device: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(device)
        if self._group is None:
            self._group = stateless_init_process_group(self._host, self._port, 0, self._world_size, device)
        packed_nccl_broadcast_producer(
            iterator=iter(self._tensors.items()),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=_BUFFER_BYTES,
            num_buffers=_NUM_BUFFERS,
        )
        torch.cuda.synchronize(device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def only_known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a dataclass of this release of vLLM has: packing moved between its messages."""
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in known}
