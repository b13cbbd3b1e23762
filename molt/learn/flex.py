"""Row attention by torch's flex kernels: the blocks of the mask follow from the lengths of rows, so that nothing is quadratic in them.

transformers finds the blocks by a compiled program over all pairs of tokens, which takes minutes to compile at some lengths
(github.com/pytorch/pytorch/issues/182060); the flex attention of NeMo AutoModel's layers knows no rows at all. Both get this one.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from molt.errors import SettingError

BLOCK = 128
"""Tokens along each side of a block of the mask."""
KERNEL: Any = {"BACKEND": "TRITON"}
"""Under 128 tokens torch would take its kernel for decoding, which found no tiling for grouped heads at a length that varies (2.11)."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention inside each row. query, key, value (1, H, L, D); returns (1, L, H, D). SettingError where it cannot learn."""
    if query.requires_grad and not query.is_cuda:
        raise SettingError("fsdp.attn_implementation=flex, torch's flex kernels learn on a GPU only; set it to sdpa")
    mask = row_blocks(lengths, window, query.device)
    output = _kernels(is_compiled=query.is_cuda)(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1], kernel_options=KERNEL
    )
    assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
    return output.transpose(1, 2)


@cache
def _kernels(*, is_compiled: bool) -> Any:
    """Imported on first use, which takes a while. Not compiled, it makes all scores at once: for small inputs on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if is_compiled else flex_attention


@lru_cache(maxsize=8)
def row_blocks(lengths: tuple[int, ...], window: int | None, device: torch.device) -> Any:
    """The torch BlockMask of rows of these lengths, each token seeing those of its row up to itself, the newest `window` of them.

    Kept, since every layer of a pass asks for the same.
    """
    from torch.nn.attention.flex_attention import BlockMask

    row_L = np.repeat(np.arange(len(lengths)), lengths)
    size = len(row_L)
    row = torch.from_numpy(np.pad(row_L, (0, -size % BLOCK), constant_values=-1)).to(device)

    def may_look(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_seen = (row[query] == row[key]) & (query >= key)
        return is_seen if window is None else is_seen & (query - key < window)

    partial, full = (_ordered(blocks, device) for blocks in needed_blocks(row_L, window))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=may_look, seq_lengths=(size, size))


def needed_blocks(row_L: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Blocks (B, B) of queries by keys of which a part is seen, and those that are seen whole. row_L: row of each token, ascending."""
    first = np.arange(0, len(row_L), BLOCK)
    last = np.minimum(first + BLOCK, len(row_L)) - 1
    begin = np.searchsorted(row_L, row_L[first])  # of the row that the first query of a block is in
    oldest = begin if window is None else np.maximum(begin, first - window + 1)
    is_before = first[:, None] > first[None, :]
    is_needed = (is_before & (last[None, :] >= oldest[:, None])) | np.eye(len(first), dtype=bool)
    is_full = is_before & (row_L[last][:, None] == row_L[first][None, :])
    if window is not None:
        is_full &= last[:, None] - first[None, :] < window
    return is_needed & ~is_full, is_full


def _ordered(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block takes, (1, 1, B), and their numbers in front of the others, (1, 1, B, B). int32."""
    numbers = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return torch.from_numpy(blocks.sum(1).astype(np.int32))[None, None].to(device), numbers[None, None].to(device)
