"""Digests of tensors, computed where they lie as they pass: nothing of a tensor is copied to the host or held.

    bytes, C order --> words of 32 bits --> pieces of 65,536 words --> two sums each --> blake2b-128 of all sums and the size

A sum is sum_i w_i x_i mod 2^64 with a fixed table of random 64-bit w: multilinear hashing (Carter and Wegman 1979; on such words Lemire
and Kaser 2014, "Strongly universal string hashing is fast"). Two pieces that differ have equal pairs of sums with probability 2^-66
at most, unless someone who knows the table chose the difference: a digest tells damage and mistakes, it is no signature. Sums of
integers do not depend on their order, so every device finds the same: a GPU by one launch for many tensors, which reads each once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

PIECE_WORDS = 1 << 16
"""Words under one pair of sums."""
_CHUNK_PIECES = 32
"""Pieces that are summed at once without the kernel: their products take 16 MiB."""
BLOCK = 2048
"""Words that one step of the kernel takes; it divides PIECE_WORDS."""


class Digester:
    """Digests of tensors that pass."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}

    def note(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sum tensors now, those of a device together, in the current stream; they may be overwritten afterwards."""
        noted = list(tensors)
        sums = _sums([tensor for _, tensor in noted])
        self._sums |= {name: (found, tensor.nbytes) for (name, tensor), found in zip(noted, sums, strict=True)}

    def take(self) -> dict[str, str]:
        """Digest of each tensor noted since the last call, 128 bits in hex. Waits for the devices."""
        noted, self._sums = self._sums, {}
        devices = {sums.device for sums, _ in noted.values()}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # it may have been noted in another stream
        found: dict[str, str] = {}
        for device in devices:
            here = {name: item for name, item in noted.items() if item[0].device == device}
            together = torch.cat([sums for sums, _ in here.values()]).cpu().split([len(sums) for sums, _ in here.values()])
            for (name, (_, size)), sums in zip(here.items(), together, strict=True):
                found[name] = hashlib.blake2b(sums.numpy().tobytes() + size.to_bytes(8, "little"), digest_size=16).hexdigest()
        return {name: found[name] for name in noted}


@cache
def _table(device: torch.device) -> torch.Tensor:
    """(2, PIECE_WORDS) int64: the random factors of both sums."""
    drawn = hashlib.shake_128(b"molt.rollout.digest").digest(2 * PIECE_WORDS * 8)
    return torch.frombuffer(bytearray(drawn), dtype=torch.int64).view(2, PIECE_WORDS).to(device)


@torch.no_grad()
def _sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(pieces, 2) int64 of each."""
    parts = [_bytes_of(tensor) for tensor in tensors]
    found: dict[int, torch.Tensor] = {}
    for device in {part.device for part in parts}:
        here = {number: part for number, part in enumerate(parts) if part.device == device}
        is_by_kernel = is_usable(next(iter(here.values())))
        sums = sums_by_kernel([*here.values()]) if is_by_kernel else map(plain_sums, here.values())
        found |= zip(here, sums, strict=True)
    return [found[number] for number in range(len(parts))]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """(bytes,) uint8, contiguous, from a word on."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 4 or data.data_ptr() % 4 else data  # a slice of a buffer may begin anywhere


def plain_sums(data: torch.Tensor) -> torch.Tensor:
    """data: (bytes,) uint8, contiguous from a word on. (pieces, 2) int64 by torch's own operations."""
    whole = data.numel() - data.numel() % (4 * PIECE_WORDS)
    pieces = data[:whole].view(torch.int32).view(-1, PIECE_WORDS)
    parts = [_sums_of(pieces[start : start + _CHUNK_PIECES]) for start in range(0, len(pieces), _CHUNK_PIECES)]
    if whole < data.numel():
        rest = data[whole:]
        parts.append(_sums_of(_padded(rest).view(torch.int32).view(1, -1)))
    if not parts:
        return torch.zeros(0, 2, dtype=torch.int64, device=data.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sums_of(words: torch.Tensor) -> torch.Tensor:
    """words: (pieces, words) int32. Products and sums wrap at 64 bits."""
    table = _table(words.device)[:, : words.shape[1]]
    wide = words.to(torch.int64)
    return torch.stack([(wide * table[0]).sum(dim=1), wide.mul_(table[1]).sum(dim=1)], dim=1)


def _padded(data: torch.Tensor) -> torch.Tensor:
    """A copy that ends with a whole word."""
    return torch.nn.functional.pad(data, (0, -data.numel() % 4))


def is_usable(data: torch.Tensor) -> bool:
    """Whether the kernel runs where the bytes are."""
    return data.is_cuda and find_spec("triton") is not None


def sums_by_kernel(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same of tensors of one device, by one program a piece and one launch for all."""
    words = [(_padded(part) if part.numel() % 4 else part).view(torch.int32) for part in parts]
    device, counts = parts[0].device, [-(-len(part) // PIECE_WORDS) for part in words]
    owner = np.repeat(np.arange(len(words)), counts)
    if not len(owner):
        return [torch.empty(0, 2, dtype=torch.int64, device=device) for _ in words]
    first = np.cumsum([0, *counts[:-1]])
    facts = np.stack([[part.data_ptr() for part in words], [len(part) for part in words], first])
    sums = torch.empty(len(owner), 2, dtype=torch.int64, device=device)
    with torch.cuda.device_of(sums):
        kernel()[(len(owner),)](
            torch.from_numpy(owner).to(device), torch.from_numpy(facts).to(device), len(words), _table(device), sums,
            PIECE=PIECE_WORDS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return list(sums.split(counts))


@cache
def kernel() -> Any:
    """Both sums of a piece by one program. Made on first use: a machine without a GPU needs no triton."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def sum_pieces(owner, facts, num_parts, table, sums, PIECE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        program = tl.program_id(0).to(tl.int64)
        part = tl.load(owner + program)
        words = tl.load(facts + part).to(tl.pointer_type(tl.int32))
        size = tl.load(facts + num_parts + part)
        begin = (program - tl.load(facts + 2 * num_parts + part)) * PIECE
        one = tl.zeros((BLOCK,), dtype=tl.int64)
        other = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(0, PIECE, BLOCK):
            place = start + tl.arange(0, BLOCK)
            spot = begin + place
            word = tl.load(words + spot, mask=spot < size, other=0).to(tl.int64)
            one += word * tl.load(table + place)
            other += word * tl.load(table + PIECE + place)
        tl.store(sums + 2 * program, tl.sum(one, axis=0))
        tl.store(sums + 2 * program + 1, tl.sum(other, axis=0))

    return sum_pieces
