"""A vLLM worker whose next weight update breaks where a test says; its transfer engine reads a file in place of CUDA handles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from molt.rollout import vllm_worker
from molt.rollout.vllm_worker import RefitExtension
from molt.rollout.weights import read_tensors

_break: list[tuple[str, int]] = []
"""Where the next update breaks, and after how many tensors."""


def _maybe(where: str) -> None:
    if _break and _break[0][0] == where:
        _break.clear()
        raise RuntimeError(f"broken in {where}")


def _breaking(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(pairs):
        if _break and _break[0] == ("load", number):
            _maybe("load")
        yield pair


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the tensors lie."""

    path: str


class FileTransfer(IPCWeightTransferEngine):
    """vLLM's engine for CUDA handles, handed tensors from a file."""

    init_info_cls = WeightTransferInitInfo  # type: ignore[assignment]
    update_info_cls = FileUpdate  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: Any) -> None:
        return

    def start_weight_update(self) -> None:
        super().start_weight_update()
        _maybe("start")

    def receive_weights(self, update_info: Any) -> None:
        self.model.load_weights(_breaking(read_tensors(update_info.path)))

    def finish_weight_update(self) -> None:
        _maybe("finish")
        super().finish_weight_update()


WeightTransferEngineFactory._registry["ipc"] = lambda: FileTransfer
vllm_worker.read_tensors = lambda path, **options: _breaking(read_tensors(path, **options))


class BreakingExtension(RefitExtension):
    """Told by molt_break."""

    def molt_break(self, where: str, num_tensors: int, core: int | None = None) -> dict[str, Any]:
        """Break the next update; on one data-parallel core, or on all."""
        index = self.vllm_config.parallel_config.data_parallel_index
        _break[:] = [(where, num_tensors)] if core in (None, index) else []
        return {"index": index}
