"""Row attention by flex kernels: the blocks of its mask are those of the whole mask, and it finds what the plain row attention finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt.errors import SettingError
from molt.learn.attention import flex_rows_attention, rows_attention
from molt.learn.flex import BLOCK, needed_blocks, row_blocks

LENGTHS = ((5,), (128,), (1, 127, 128), (130, 3, 260, 128, 1), (700,))


def whole_mask(row_L: np.ndarray, window: int | None) -> np.ndarray:
    """(L, L): which key each query sees."""
    place_L = np.arange(len(row_L))
    distance = place_L[:, None] - place_L[None, :]
    return (row_L[:, None] == row_L[None, :]) & (distance >= 0) & (distance < (len(row_L) if window is None else window))


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_are_those_in_which_anything_is_seen_and_those_seen_whole(lengths: tuple[int, ...], window: int | None) -> None:
    row_L = np.repeat(np.arange(len(lengths)), lengths)
    mask, partial, full = whole_mask(row_L, window), *needed_blocks(row_L, window)
    assert not (partial & full).any()
    for query in range(len(partial)):
        for key in range(len(partial)):
            block = mask[query * BLOCK : (query + 1) * BLOCK, key * BLOCK : (key + 1) * BLOCK]
            assert block.any() <= (partial | full)[query, key]
            assert full[query, key] <= block.all()
            # a whole block may go through the mask, which costs a little; on the diagonal none is whole
            assert full[query, key] == (block.all() and query > key)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", LENGTHS[2:4])
def test_packed_rows_attend_as_each_row_alone(lengths: tuple[int, ...], window: int | None) -> None:
    generator, size = torch.Generator().manual_seed(0), sum(lengths)
    query, key, value = (torch.randn(1, heads, size, 16, generator=generator) for heads in (4, 2, 2))
    found = [
        attend(torch.nn.Identity(), query, key, value, None, row_lengths=lengths, sliding_window=window, scaling=0.3)[0]
        for attend in (rows_attention, flex_rows_attention)
    ]
    assert found[1].shape == (1, size, 4, 16)
    assert torch.allclose(*found, atol=1e-5)


def test_mask_is_kept_for_the_layers_of_a_pass() -> None:
    device = torch.device("cpu")
    assert row_blocks((3, 200), None, device) is row_blocks((3, 200), None, device)


def test_learning_on_the_cpu_is_refused_with_the_way_out() -> None:
    query = torch.zeros(1, 1, 3, 16, requires_grad=True)
    with pytest.raises(SettingError, match="flex, torch's flex kernels learn on a GPU only; set it to sdpa"):
        flex_rows_attention(torch.nn.Identity(), query, query, query, None, row_lengths=(3,))
