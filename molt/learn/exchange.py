"""What ranks tell each other: small facts as objects, token columns as flat float32.

Ranks of one data shard know the same of its rows; the first of them speaks for all, so that nothing counts twice and all decide alike.
Axes: T sampled tokens of the whole batch in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from molt.admission.plan import StepPlan
from molt.config import FsdpSettings
from molt.learn.routes import RouteCounts, add_counts

Fact = TypeVar("Fact")


def gather(fact: Fact, group_size: int = 1) -> list[Fact]:
    """The fact of the first rank of each data shard, in shard order, on every rank. group_size: ranks of one shard."""
    facts: list[Fact | None] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts[::group_size]  # type: ignore[return-value]


def of_slices(counts: list[RouteCounts], fsdp: FsdpSettings) -> list[RouteCounts]:
    """Counts of each layer over the slices of this rank's data shard; tensor-parallel ranks counted the same tokens. A collective."""
    if fsdp.cp_size == 1:
        return counts
    first = dist.get_rank() // fsdp.group_size * fsdp.group_size
    return add_counts(gather(counts)[first : first + fsdp.group_size : fsdp.tp_size])


def first_refusal(fact: Fact | None) -> Fact | None:
    """The first rank's fact that is not None, the same on every rank: all ranks turn back together or none does."""
    return next((found for found in gather(fact) if found is not None), None)


def token_offsets(plan: StepPlan) -> np.ndarray:
    """(S + 1,) int64: where each segment's sampled tokens lie on T."""
    return np.concatenate([[0], np.cumsum([row.n_sampled for row in plan.segments])]).astype(np.int64)


def places_of(plan: StepPlan, rank: int) -> list[int]:
    """Places in plan.segments that a data shard trains, micro-batch after micro-batch."""
    return [place for batch in plan.micro_batches[rank] for place in batch]


def gather_column(plan: StepPlan, rank: int, own: torch.Tensor, *, device: torch.device, group_size: int = 1) -> torch.Tensor:
    """The column over T, float32, on the CPU, on every rank. own: over the sampled tokens of the data shard, in places_of order.

    rank: the data shard. group_size: ranks of one shard.
    """
    offsets = token_offsets(plan)
    sizes = [sum(plan.segments[p].n_sampled for p in places_of(plan, r)) for r in range(len(plan.micro_batches))]
    assert len(own) == sizes[rank], f"column of {len(own)} tokens, the plan has {sizes[rank]} on rank {rank}"
    padded = torch.zeros(max(*sizes, 1), dtype=torch.float32, device=device)
    padded[: len(own)] = own.to(device, torch.float32)
    columns = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(columns, padded)
    whole_T = torch.empty(int(offsets[-1]), dtype=torch.float32)
    for r, column in enumerate(columns[::group_size]):
        _lay(whole_T, column.cpu(), offsets, places_of(plan, r))
    return whole_T


def _lay(whole_T: torch.Tensor, column: torch.Tensor, offsets: np.ndarray, places: Sequence[int]) -> None:
    """Write a rank's column to the places of its segments."""
    at = 0
    for place in places:
        low, high = int(offsets[place]), int(offsets[place + 1])
        whole_T[low:high] = column[at : at + high - low]
        at += high - low
