"""What a producer sends and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from molt.log.digest import bytes_digest
from molt.log.encode import WrittenRows
from molt.schema import TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Rows of one producer that are committed together, under a place in its dense order."""

    producer: str
    seq: int
    attempt: int
    tables: dict[str, pa.RecordBatch | WrittenRows]
    """Rows by table, without lsn."""
    digest: bytes
    """Over the digests of the rows: tells a repetition from a conflict."""
    size_bytes: int
    """Bytes that the rows take in memory."""
    num_rows: int
    """Rows over all tables."""
    is_urgent: bool = False
    """Commit now instead of waiting for the window."""

    @classmethod
    def of(
        cls, producer: str, seq: int, attempt: int, tables: dict[str, pa.RecordBatch | WrittenRows], *, is_urgent: bool = False
    ) -> Message:
        """A message with its digest."""
        digests = {
            name: list(rows.digests) if isinstance(rows, WrittenRows) else rows["digest"].to_pylist() for name, rows in tables.items()
        }
        return cls(
            producer=producer,
            seq=seq,
            attempt=attempt,
            tables=tables,
            digest=message_digest(digests),
            size_bytes=_size_of(tables),
            num_rows=sum(map(len, tables.values())),
            is_urgent=is_urgent,
        )

    def __reduce__(self) -> tuple[Callable[..., Message], tuple[object, ...]]:
        encoded = {name: rows if isinstance(rows, WrittenRows) else _to_ipc(rows) for name, rows in self.tables.items()}
        return _from_ipc, (self.producer, self.seq, self.attempt, encoded, self.digest, self.is_urgent)


def _size_of(tables: dict[str, pa.RecordBatch | WrittenRows]) -> int:
    return sum(32 * len(rows) if isinstance(rows, WrittenRows) else rows.nbytes for rows in tables.values())


def message_digest(row_digests: dict[str, list[bytes]]) -> bytes:
    """Digest of a message from the digests of its rows, table by table in commit order.

    Payloads are left out: their name is their content.
    """
    parts: list[bytes] = []
    for name in TABLES:
        if name != "payloads" and row_digests.get(name):
            parts += (name.encode(), *row_digests[name])
    return bytes_digest(*parts)


def _to_ipc(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return bytes(sink.getvalue())


def _from_ipc(producer: str, seq: int, attempt: int, encoded: dict[str, bytes | WrittenRows], digest: bytes, is_urgent: bool) -> Message:
    tables = {name: data if isinstance(data, WrittenRows) else pa.ipc.open_stream(data).read_next_batch() for name, data in encoded.items()}
    return Message(
        producer=producer,
        seq=seq,
        attempt=attempt,
        tables=tables,
        digest=digest,
        size_bytes=_size_of(tables),
        num_rows=sum(map(len, tables.values())),
        is_urgent=is_urgent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The message is durable as its profile promises, once, whatever is resent."""

    producer: str
    seq: int
    group: int
    """Number of the group commit that holds it, or of a later one for a repetition."""
    lsn_end: int
    """Largest lsn of the log when it was acknowledged."""
    is_repetition: bool = False
