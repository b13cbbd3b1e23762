"""Digests of tensors, computed where they lie as they pass: nothing of a tensor is copied to the host or held.

    bytes, C order --> words of 32 bits --> pieces of 65,536 words --> two sums each --> blake2b-128 of all sums and the size

A sum is sum_i w_i x_i mod 2^64 with a fixed table of random 64-bit w: multilinear hashing (Carter and Wegman 1979; on such words Lemire
and Kaser 2014, "Strongly universal string hashing is fast"). Two pieces that differ have equal pairs of sums with probability 2^-66
at most, unless someone who knows the table chose the difference: a digest tells damage and mistakes, it is no signature. Sums of
integers do not depend on their order, so every device finds the same.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch

PIECE_WORDS = 1 << 16
"""Words under one pair of sums."""
_CHUNK_PIECES = 32
"""Pieces that are summed at once: their products take 16 MiB."""


class Digester:
    """Digests of tensors that pass one after another."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Sum a tensor now, on its device and in the current stream; it may be overwritten afterwards."""
        self._sums[name] = (_sums(tensor), tensor.nbytes)

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
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """(pieces, 2) int64."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()  # a slice of a buffer that does not begin at a word
    whole = data.numel() - data.numel() % (4 * PIECE_WORDS)
    pieces = data[:whole].view(torch.int32).view(-1, PIECE_WORDS)
    parts = [_sums_of(pieces[start : start + _CHUNK_PIECES]) for start in range(0, len(pieces), _CHUNK_PIECES)]
    if whole < data.numel():
        rest = data[whole:]
        parts.append(_sums_of(torch.nn.functional.pad(rest, (0, -rest.numel() % 4)).view(torch.int32).view(1, -1)))
    if not parts:
        return torch.zeros(0, 2, dtype=torch.int64, device=tensor.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sums_of(words: torch.Tensor) -> torch.Tensor:
    """words: (pieces, words) int32. Products and sums wrap at 64 bits."""
    table = _table(words.device)[:, : words.shape[1]]
    wide = words.to(torch.int64)
    return torch.stack([(wide * table[0]).sum(dim=1), wide.mul_(table[1]).sum(dim=1)], dim=1)
