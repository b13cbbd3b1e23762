"""Context parallelism over packed rows: every rank computes a slice of a micro-batch's tokens and sees the keys before them.

    packed micro-batch, all its rows --cut--> own tokens --layers--> own hidden states --head--> own log-probs --gather--> all log-probs
                                                 |  in each attention: keys and values of all slices (their gradients are summed back)

The cut is contiguous and knows nothing of rows. A row that began in an earlier slice goes on here: its keys begin there. Every rank of
the group ends with the log-probs of all sampled tokens, so that gate and loss are computed as without slices; the gradient of a
log-prob flows through the rank that computed it, and FSDP sums the slices like other ranks.

Axes: molt.learn.packing; l tokens of one slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from molt.learn.packing import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What the attention of one rank needs to know of the other slices."""

    key_lengths: tuple[int, ...]
    """Keys of each row that has queries here; longer than its queries for a row that began earlier."""
    first_key: int
    """Place in L of the first key that a query here may see."""
    stop: int
    """Place in L after the last token of the slice."""
    group: dist.ProcessGroup

    def keys(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (1, H, l, D) of this slice to those that its queries may see, (1, H, n, D). A collective."""
        both_lHD = torch.cat([key[0], value[0]]).transpose(0, 1).contiguous()  # (l, 2H, D)
        seen = _Gathered.apply(both_lHD, self.group)[self.first_key : self.stop].transpose(0, 1)  # (2H, n, D)
        return seen[None, : key.shape[1]], seen[None, key.shape[1] :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One micro-batch as one rank computes it."""

    packed: Packed
    """Own tokens; row_lengths counts queries, row by row."""
    own: Slice
    counts: tuple[int, ...]
    """Sampled tokens that each slice predicts."""

    def gather(self, column_n: torch.Tensor) -> torch.Tensor:
        """A column over the slice's sampled tokens to one over all of them. # (N,)"""
        return _Columns.apply(column_n, self.counts, self.own.group)


def cut(packed: Packed, group: dist.ProcessGroup) -> Cut:
    """The slice of this rank. A micro-batch whose length is no multiple of the slices ends in a row of padding that nothing learns from."""
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    packed = _padded(packed, num)
    length = packed.input_ids.shape[1]
    written = length - packed.n_padding
    bounds = [length * i // num for i in range(num + 1)]
    low, high = bounds[rank], bounds[rank + 1]
    starts = [0]
    for n in packed.row_lengths:
        starts.append(starts[-1] + n)
    rows = [(start, stop) for start, stop in pairwise(starts) if start < high and stop > low]
    # Predicting places rise with N, so the tokens of a slice are one run of it.
    edges = torch.searchsorted(packed.index_N, torch.tensor(bounds, device=packed.index_N.device)).tolist()
    span = slice(edges[rank], edges[rank + 1])
    own = replace(
        packed,
        input_ids=packed.input_ids[:, low:high],
        position_ids=packed.position_ids[:, low:high],
        row_lengths=tuple(min(stop, high) - max(start, low) for start, stop in rows),
        index_N=packed.index_N[span] - low,
        target_N=packed.target_N[span],
        temperature_N=packed.temperature_N[span],
        row_N=packed.row_N[span],
        routes_LMK=None if packed.routes_LMK is None else packed.routes_LMK[low:high],
        n_padding=high - max(low, min(high, written)),
    )
    seen = Slice(key_lengths=tuple(min(stop, high) - start for start, stop in rows), first_key=rows[0][0], stop=high, group=group)
    return Cut(packed=own, own=seen, counts=tuple(b - a for a, b in pairwise(edges)))


def _padded(packed: Packed, multiple: int) -> Packed:
    """With a last row that makes the length a multiple; its routes are unknown and nothing in it was sampled."""
    missing = -packed.input_ids.shape[1] % multiple
    if not missing:
        return packed
    device, routes = packed.input_ids.device, packed.routes_LMK
    if routes is not None:
        routes = torch.cat([routes, routes.new_full((missing, *routes.shape[1:]), -1)])
    return replace(
        packed,
        input_ids=torch.cat([packed.input_ids, packed.input_ids.new_zeros(1, missing)], dim=1),
        position_ids=torch.cat([packed.position_ids, torch.arange(missing, device=device)[None]], dim=1),
        row_lengths=(*packed.row_lengths, missing),
        routes_LMK=routes,
        n_padding=packed.n_padding + missing,
    )


class _Gathered(torch.autograd.Function):
    """Slices laid end to end along the first axis; the gradients that all ranks have for a slice are summed there."""

    @staticmethod
    def forward(ctx, own, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        whole = own.new_empty((own.shape[0] * dist.get_world_size(group), *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        own = grad.new_empty((grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _Columns(torch.autograd.Function):
    """Columns of unequal length laid end to end. All ranks compute one loss from the whole, so each takes back its own part."""

    @staticmethod
    def forward(ctx, own, counts, group):  # type: ignore[no-untyped-def]
        rank = dist.get_rank(group)
        ctx.span = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        longest = max(*counts, 1)
        padded = own.new_zeros(longest)
        padded[: len(own)] = own
        whole = own.new_empty(longest * len(counts))
        dist.all_gather_into_tensor(whole, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(whole.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad[ctx.span].contiguous(), None, None
