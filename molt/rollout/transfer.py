"""The sending side of a weight transfer that stays on GPUs: handles for engines on the same GPU."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from molt.errors import RefitError
from molt.rollout.engine import WeightSource
from molt.rollout.weights import digest_tensors, size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Weights that engines on the same GPU may read in place, as long as this object lives."""

    source: WeightSource
    tensors: dict[str, torch.Tensor]


def offer_ipc(tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> Offer:
    """CUDA handles of all tensors. RefitError for a tensor that is not on a GPU: it has no handle."""
    from torch.multiprocessing.reductions import reduce_tensor

    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    for name, tensor in held.items():
        if not tensor.is_cuda:
            raise RefitError(f"{name} lies on {tensor.device}, transport=ipc needs it on a GPU; publish with transport file")
    handles = [{str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]} for tensor in held.values()]
    update = {
        "names": list(held),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in held.values()],
        "shapes": [list(tensor.shape) for tensor in held.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
    source = WeightSource(
        policy_version=policy_version,
        transport="ipc",
        digests=digest_tensors(held),
        options={"update": base64.b64encode(pickle.dumps([update])).decode(), "size_bytes": str(size_bytes(held.values()))},
    )
    return Offer(source=source, tensors=held)
