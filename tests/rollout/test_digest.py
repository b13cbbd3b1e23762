"""Digests of tensors: what they are over, and what they tell apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from molt.rollout.digest import PIECE_WORDS, Digester
from molt.rollout.weights import tensor_digest
from tests.interpreted import run_interpreted


def plain(data: bytes) -> str:
    """The definition, word by word, in whole numbers."""
    drawn = hashlib.shake_128(b"molt.rollout.digest").digest(2 * PIECE_WORDS * 8)
    factors = [int.from_bytes(drawn[8 * i : 8 * i + 8], "little", signed=True) for i in range(2 * PIECE_WORDS)]
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    sums = b""
    for start in range(0, len(words), PIECE_WORDS):
        for table in (factors[:PIECE_WORDS], factors[PIECE_WORDS:]):
            total = sum(w * x for w, x in zip(table, words[start : start + PIECE_WORDS], strict=False)) % 2**64
            sums += total.to_bytes(8, "little")
    return hashlib.blake2b(sums + len(data).to_bytes(8, "little"), digest_size=16).hexdigest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.float32).reshape(2, 3) - 2.5,
        torch.tensor(1.5),
        torch.zeros(0),
        torch.arange(7).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        (torch.arange(33 * 4 * PIECE_WORDS + 5) % 251).to(torch.uint8)[-2 * 4 * PIECE_WORDS - 5 :],
    ],
    ids=["float32", "scalar", "empty", "odd bfloat16", "bool", "pieces and a rest"],
)
def test_a_digest_is_that_of_its_definition(tensor: torch.Tensor) -> None:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert tensor_digest(tensor) == plain(data)


def test_a_digest_is_over_the_bytes_in_c_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor) != tensor_digest(tensor.t())


def test_many_pieces_are_summed_as_one_by_one() -> None:
    tensor = torch.randint(-(2**31), 2**31 - 1, (70 * PIECE_WORDS + 3,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    again = torch.cat([torch.zeros(1, dtype=torch.int32), tensor])[1:]  # another place in memory
    assert tensor_digest(tensor) == tensor_digest(again)
    for place in (0, PIECE_WORDS, 69 * PIECE_WORDS, len(tensor) - 1):
        changed = tensor.clone()
        changed[place] ^= 1
        assert tensor_digest(changed) != tensor_digest(tensor)


def test_changes_that_cancel_in_a_plain_sum_change_the_digest() -> None:
    tensor = torch.ones(4)
    for change in ([1.0, -1.0, 0.0, 0.0], [-2.0, -2.0, 0.0, 0.0]):  # one moved, two signs flipped
        assert tensor_digest(tensor + torch.tensor(change)) != tensor_digest(tensor)
    swapped = torch.arange(4.0)[[1, 0, 2, 3]]
    assert tensor_digest(swapped) != tensor_digest(torch.arange(4.0))


def test_zeros_of_other_sizes_have_other_digests() -> None:
    sizes = [0, 1, 4, 4 * PIECE_WORDS, 8 * PIECE_WORDS]
    assert len({tensor_digest(torch.zeros(size, dtype=torch.uint8)) for size in sizes}) == len(sizes)


def test_a_part_of_a_buffer_that_begins_between_words_is_read() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    part = buffer[2:10].view(torch.bfloat16)
    assert tensor_digest(part) == plain(bytes(range(2, 10)))


def test_what_was_noted_may_be_overwritten() -> None:
    digester, tensor = Digester(), torch.ones(5)
    digester.note([("a", tensor)])
    tensor.zero_()
    assert digester.take() == {"a": tensor_digest(torch.ones(5))} and digester.take() == {}


def test_tensors_noted_together_have_the_digests_of_each_alone() -> None:
    tensors = {"a": torch.arange(7), "none": torch.zeros(0), "b": torch.ones(PIECE_WORDS + 1), "c": torch.arange(9, dtype=torch.uint8)[1:]}
    digester = Digester()
    digester.note(tensors.items())
    digester.note([])
    assert digester.take() == {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def test_kernel_passes_its_cases_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("digest_cases.py"))
