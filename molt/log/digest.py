"""Digests of rows: blake2b-128 over every column but lsn and digest, the same for live, stored and compacted rows.

A column without a value adds nothing, so a column that is added later leaves the digests of older rows as they are.
A null inside a list is a state of its own: it never reads as 0, as NaN or as the end of the list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SIZE = 16
NULL_FLOAT_BITS = {2: 0x7EDA, 4: 0x7FC0DEAD, 8: 0x7FF80000DEADDEAD}
"""A NaN that no arithmetic makes stands for null inside a list of floats."""
_UNHASHED = {"lsn", "digest"}
_LENGTH = struct.Struct("<I")


def bytes_digest(*parts: bytes | memoryview) -> bytes:
    """blake2b-128 over the parts as one stream."""
    digest = hashlib.blake2b(digest_size=SIZE)
    for part in parts:
        digest.update(part)
    return digest.digest()


def filled(values: pa.Array) -> np.ndarray:
    """Values of a fixed-width array as numpy, nulls replaced by the pattern that stands for null."""
    if pa.types.is_boolean(values.type):
        codes = values.cast(pa.uint8())
        return np.asarray(pc.fill_null(codes, pa.scalar(2, pa.uint8())))
    width = values.type.bit_width // 8
    if values.null_count == 0:
        return np.asarray(values.to_numpy(zero_copy_only=True))
    if pa.types.is_floating(values.type):
        present = values.is_valid().to_numpy(zero_copy_only=False)
        bits = np.frombuffer(values.buffers()[1], f"u{width}", len(values), values.offset * width).copy()
        bits[~present] = NULL_FLOAT_BITS[width]
        return bits.view(f"f{width}")
    lowest = np.iinfo(values.type.to_pandas_dtype()).min
    return np.asarray(pc.fill_null(values, pa.scalar(int(lowest), values.type)))


def _cells(values: np.ndarray, offsets: Sequence[int]) -> list[bytes]:
    """Bytes of each list."""
    width, raw = values.dtype.itemsize, np.ascontiguousarray(values).tobytes()
    return [raw[start * width : stop * width] for start, stop in pairwise(offsets)]


def _strings(values: pa.Array) -> list[bytes | None]:
    """Length and bytes of each string or blob."""
    kind = pa.large_binary() if values.type in (pa.large_string(), pa.large_binary()) else pa.binary()
    return [None if text is None else _LENGTH.pack(len(text)) + text for text in values.cast(kind).to_pylist()]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_binary(kind) or kind in (pa.large_string(), pa.large_binary())


def _lists(column: pa.Array) -> list[bytes]:
    """Each list: its length, then its values child by child."""
    offsets = np.asarray(column.offsets)
    start, stop = int(offsets[0]), int(offsets[-1])
    values = column.values.slice(start, stop - start)
    places: list[int] = (offsets - start).tolist()
    pieces = [[_LENGTH.pack(b - a) for a, b in pairwise(places)]]
    for child in values.flatten() if pa.types.is_struct(values.type) else [values]:
        if _is_text(child.type):
            texts = [text if text is not None else b"\xff" for text in _strings(child)]
            pieces.append([b"".join(texts[a:b]) for a, b in pairwise(places)])
        else:
            pieces.append(_cells(filled(child), places))
    return [b"".join(parts) for parts in zip(*pieces, strict=True)]


def _column_cells(name: str, column: pa.Array) -> list[bytes]:
    """Name and value of each row that has one; nothing for a null."""
    tag = _LENGTH.pack(len(name)) + name.encode()
    cells: Sequence[bytes | None]
    if pa.types.is_list(column.type):
        cells = _lists(column)
    elif _is_text(column.type):
        cells = _strings(column)
    else:
        cells = _cells(filled(column), range(len(column) + 1))
    if column.null_count == 0:
        return [tag + cell for cell in cells if cell is not None]
    valid = column.is_valid().to_pylist()
    return [tag + cell if is_there and cell is not None else b"" for cell, is_there in zip(cells, valid, strict=True)]


def row_digests(rows: pa.RecordBatch) -> list[bytes]:
    """Digest of each row, over the columns present but lsn and digest, in alphabetical order of their names."""
    if not rows.num_rows:
        return []
    columns = [_column_cells(name, rows.column(name)) for name in sorted(set(rows.schema.names) - _UNHASHED)]
    return [hashlib.blake2b(b"".join(row), digest_size=SIZE).digest() for row in zip(*columns, strict=True)]


def merkle_root(digests: Sequence[bytes]) -> bytes:
    """Root over row digests in lsn order: leaves and nodes are hashed apart, an odd node moves up as it is."""
    if not digests:
        return bytes_digest(b"molt-empty")
    level = [bytes_digest(b"\x00", digest) for digest in digests]
    while len(level) > 1:
        pairs = [bytes_digest(b"\x01", left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    return level[0]
