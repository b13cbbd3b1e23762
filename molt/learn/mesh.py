"""How the trainer's ranks share one policy: which read the same rows, which hold which part of the weights.

    rank = ((replica * shards + shard) * cp_size + slice) * tp_size + part

    replica, shard   other rows each: a data shard of the plan is one (replica, shard)
    slice            the same rows, other tokens of them (context parallelism)
    part             the same rows and tokens, other columns of the weights (tensor parallelism)

Parameters are sharded by FSDP2 over shard and slice together and copied to every replica; tensor parallelism cuts them before that.
Neighbours in rank share a part of the work most often, so tp is innermost: it stays inside one host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from molt.config import FsdpSettings
from molt.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """The process groups of one rank."""

    fsdp: DeviceMesh
    """One axis (shard and slice), or two (replica, then these)."""
    tp: DeviceMesh | None
    """None without tensor parallelism."""
    cp: dist.ProcessGroup | None
    """None without context parallelism."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return str(self.fsdp.device_type)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")


def make_mesh(fsdp: FsdpSettings, device_type: str) -> RankMesh:
    """The groups of this rank; a collective. Raises SettingError when the sizes do not make up the ranks that are there."""
    world = dist.get_world_size()
    if fsdp.num_ranks != world or world % (fsdp.group_size * fsdp.replicas):
        raise SettingError(
            f"fsdp.num_ranks={fsdp.num_ranks} as fsdp.replicas={fsdp.replicas} x fsdp.cp_size={fsdp.cp_size} x "
            f"fsdp.tp_size={fsdp.tp_size} and a rest of shards, {world} ranks are there; start as many as fsdp.num_ranks says"
        )
    sizes = {"replica": fsdp.replicas, "shard": world // (fsdp.replicas * fsdp.tp_size), "tp": fsdp.tp_size}
    named = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    root = init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))
    cp = None
    if fsdp.cp_size > 1:
        shape = (fsdp.num_shards, fsdp.cp_size, fsdp.tp_size)
        cp = init_device_mesh(device_type, shape, mesh_dim_names=("data", "cp", "part"))["cp"].get_group()
    return RankMesh(fsdp=root["replica", "shard"] if "replica" in named else root["shard"], tp=root["tp"] if "tp" in named else None, cp=cp)
