"""Cases of the digests' kernel. test_digest.py runs them in a process whose Triton interprets it, on the CPU."""

from __future__ import annotations

import pytest
import torch

from molt.rollout import digest
from molt.rollout.digest import PIECE_WORDS
from molt.rollout.weights import digest_tensors, tensor_digest


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 7, 4 * digest.BLOCK + 6, 4 * PIECE_WORDS, 4 * PIECE_WORDS + 1, 12 * PIECE_WORDS - 4])
def test_kernel_finds_the_sums_of_plain_operations(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    plain = tensor_digest(data)
    monkeypatch.setattr(digest, "is_usable", lambda data: True)
    assert tensor_digest(data) == plain


def test_kernel_takes_slices_that_begin_inside_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(999, dtype=torch.int32).to(torch.uint8)
    plain = tensor_digest(data[3:].clone())
    monkeypatch.setattr(digest, "is_usable", lambda data: True)
    assert tensor_digest(data[3:]) == plain


def test_kernel_takes_many_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.Generator().manual_seed(0)
    sizes = [5, 0, 4 * PIECE_WORDS, 4 * PIECE_WORDS + 6, 64, 8 * PIECE_WORDS - 1]
    tensors = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed) for size in sizes}
    plain = digest_tensors(tensors)
    monkeypatch.setattr(digest, "is_usable", lambda data: True)
    assert digest_tensors(tensors) == plain
    assert digest_tensors({"none": torch.zeros(0)}) == {"none": tensor_digest(torch.zeros(0))}
