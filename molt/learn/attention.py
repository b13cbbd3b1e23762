"""Attention over packed rows: each row attends to itself only, by construction instead of by mask."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from molt.errors import SettingError
from molt.learn import flex
from molt.learn.context import Slice

NAME, FLEX = "molt_rows", "molt_rows_flex"
"""Under these names transformers builds no mask and calls rows_attention with the row lengths that the forward was given."""
UNKNOWN = ("softcap", "s_aux", "sink_weights", "attn_mask", "position_bias")
"""What layers may ask of their attention that changes its scores, and that rows_attention does not do."""


def register() -> None:
    """Make both row attentions known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, rows_attention)
    AttentionInterface.register(FLEX, flex_rows_attention)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_lengths: tuple[int, ...] | None = None,
    slice_of: Slice | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_flex: bool = False,
    **further: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row. query, key, value (1, H, L, D); returns (1, L, H, D).

    slice_of: these are one slice of the tokens; keys and values of the others are fetched. is_flex: by flex kernels, of whole rows only.
    """
    if row_lengths is None or attention_mask is not None:
        raise SettingError(f"attention={NAME}, it needs packed rows and no mask; call the model through molt.learn.model")
    if asked := [option for option in UNKNOWN if further.get(option) is not None]:
        raise SettingError(
            f"attention={NAME}, the layers of this model give it {asked[0]}, which it does not know; "
            "set fsdp.attn_implementation=flash_attention_2 or te, or take another model"
        )
    if is_flex:
        assert slice_of is None, "fsdp.cp_size > 1 takes sdpa"
        return flex.attend(query, key, value, row_lengths, scaling, sliding_window), None
    key_lengths = row_lengths
    if slice_of is not None:
        key, value = slice_of.keys(key, value)
        key_lengths = slice_of.key_lengths
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, row_lengths, key_lengths, scaling, sliding_window), None
    if query.is_cuda and slice_of is None and sliding_window is None:
        return padded_rows(query, key, value, row_lengths, scaling), None
    outputs = [
        _one_row(q, k, v, scaling, sliding_window)
        for q, k, v in zip(query.split(row_lengths, dim=2), key.split(key_lengths, dim=2), value.split(key_lengths, dim=2), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


flex_rows_attention = partial(rows_attention, is_flex=True)


def _one_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    """One row alone, or its last queries with all keys before them: (1, H, l, D)."""
    num_queries, num_keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mask = None
    if num_queries < num_keys or (window is not None and window < num_keys):
        place = torch.arange(num_keys, device=q.device)
        distance = place[num_keys - num_queries :, None] - place[None, :]
        mask = (distance >= 0) & (distance < (num_keys if window is None else window))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)


def padded_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scaling: float | None) -> torch.Tensor:
    """All rows in one call, padded behind their ends, where a causal row never looks: for float32 on a GPU. Returns (1, L, H, D)."""
    longest, groups = max(lengths), q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    place_L = padded_places(lengths, q.device)

    def pad(x: torch.Tensor) -> torch.Tensor:
        rows = x.new_zeros(len(lengths) * longest, x.shape[1], x.shape[3]).index_copy(0, place_L, x[0].transpose(0, 1))
        return rows.view(len(lengths), longest, x.shape[1], x.shape[3]).transpose(1, 2)  # (R, H, longest, D)

    output = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, scale=scaling)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, place_L)[None]


@lru_cache(maxsize=8)
def padded_places(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(L,) place of each packed token among rows of equal length. Kept, since every layer of a pass asks for the same."""
    row_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    begin_L = torch.tensor((0, *lengths[:-1])).cumsum(0)[row_L]
    return (row_L * max(lengths) + torch.arange(len(row_L)) - begin_L).to(device)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """All rows in one kernel: torch's own variable-length flash attention, causal from the ends of rows. Returns (1, L, H, D)."""
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    natural = q.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - natural) > 1e-9:
        q = q * (scaling / natural)  # older kernels know the natural scale only
    bounds, key_bounds = row_bounds(lengths, q.device), row_bounds(key_lengths, q.device)
    left = -1 if window is None else window - 1
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))  # (L, H, D)
    output = varlen_attn(q, k, v, bounds, key_bounds, max(lengths), max(key_lengths), window_size=(left, 0))
    assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
    return output[None]


@lru_cache(maxsize=8)
def row_bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(R + 1,) int32: where rows begin and the last ends. Kept, since every layer of a pass asks for the same."""
    return torch.tensor((0, *lengths), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def block_causal_mask(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, L, L) additive mask: 0 where a token may look, -inf elsewhere. For the eager attention; quadratic in L."""
    row_L = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    place_L = torch.arange(len(row_L), device=device)
    may_look = (row_L[:, None] == row_L[None, :]) & (place_L[:, None] >= place_L[None, :])
    return torch.zeros(may_look.shape, dtype=dtype, device=device).masked_fill(~may_look, float("-inf"))[None, None]
