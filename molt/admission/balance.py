"""Which segment trains on which rank, in which micro-batch: balanced by length, the same for the same input."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], *, num_ranks: int, micro_batch_tokens: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Places in lengths, as [rank][micro-batch][position].

    Longest first onto the rank with the fewest tokens, then first fit into micro-batches of at most micro_batch_tokens
    (a longer segment gets one of its own). Every rank has the same number of micro-batches, since ranks meet in collectives:
    the missing ones are empty and train with weight 0. Nothing is dropped.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for place in order:
        load, rank = loads[0]
        ranks[rank].append(place)
        heapq.heapreplace(loads, (load + lengths[place], rank))
    packed = [_first_fit(places, lengths, micro_batch_tokens) for places in ranks]
    num_micro_batches = max(map(len, packed), default=0)
    return tuple(tuple(batches + [()] * (num_micro_batches - len(batches))) for batches in packed)


def _first_fit(places: list[int], lengths: Sequence[int], size: int) -> list[tuple[int, ...]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for place in places:
        fit = next((i for i, free in enumerate(room) if free >= lengths[place]), None)
        if fit is None:
            bins.append([])
            room.append(size)
            fit = len(bins) - 1
        bins[fit].append(place)
        room[fit] -= lengths[place]
    return [tuple(sorted(batch)) for batch in bins]
