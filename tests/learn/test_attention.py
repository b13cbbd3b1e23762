"""Attention over packed rows: the way for float32 on a GPU pads rows and gives what each row gives alone, forward and backward."""

from __future__ import annotations

import torch

from molt.learn.attention import padded_rows, rows_attention


def test_padded_rows_attend_as_each_row_alone() -> None:
    torch.manual_seed(0)
    lengths = (5, 1, 9, 3)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    padded = padded_rows(q, k, v, lengths, None)
    alone, _ = rows_attention(torch.nn.Identity(), q, k, v, None, row_lengths=lengths)
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-14)
    weight = torch.randn_like(alone)
    for one, other in zip(
        torch.autograd.grad((padded * weight).sum(), (q, k, v)), torch.autograd.grad((alone * weight).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
