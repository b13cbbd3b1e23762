"""A process group of one, for programs that train in their own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from molt.config import FsdpSettings
from molt.learn.mesh import RankMesh, make_mesh


@contextmanager
def alone() -> Iterator[RankMesh]:
    """The mesh of this process alone. A group that exists is used as it is; one made here is taken down again."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_mesh(FsdpSettings(num_ranks=dist.get_world_size()), kind)
    finally:
        if is_mine:
            dist.destroy_process_group()
