"""How a process that a test spawned as one rank ends: together with the others, and without an interpreter's teardown."""

from __future__ import annotations

import os

import torch.distributed as dist


def leave_group() -> None:
    """Meet the other ranks, leave the group and end the process.

    A rank that exits in the ordinary way while another still uses their connections may find a live thread at its end and abort.
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
