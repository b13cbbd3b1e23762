"""Segments as ragged arrays without padding and without a copy of the tokens: what packing and the gradient read.

Axes: T tokens of the whole batch in segment order, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from molt.errors import CorruptLogError, LogError
from molt.log.checked import damage_named
from molt.log.digest import row_digests
from molt.log.rows import TokenSource

SOURCES = tuple(TokenSource)
"""Code of a source is its place here."""
HEAVY = ("token_ids", "behaviour_logprobs", "spans")
NEEDED = (*HEAVY, "segment_id", "n_tokens")
"""Columns that a batch is made from and checked by."""


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Segments in the order asked. Per-token columns are made from spans on first use."""

    token_ids_T: np.ndarray
    """(T,) int32."""
    behaviour_logprobs_T: np.ndarray
    """(T,) float32, nats; NaN where not sampled."""
    offsets_S: np.ndarray
    """(S + 1,) int64: tokens of segment s are offsets_S[s]:offsets_S[s + 1]."""
    spans: pa.StructArray
    """Spans of all segments, one after the other."""
    span_offsets_S: np.ndarray
    """(S + 1,) int64 into spans."""
    scalars: pa.Table
    """The other columns, one row a segment."""

    def __len__(self) -> int:
        return len(self.offsets_S) - 1

    @cached_property
    def lengths_S(self) -> np.ndarray:
        """(S,) int64: tokens of each segment."""
        return np.diff(self.offsets_S)

    @cached_property
    def segment_T(self) -> np.ndarray:
        """(T,) int32: place of the segment of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.lengths_S)

    @cached_property
    def _span_lengths(self) -> np.ndarray:
        return np.asarray(self.spans.field("len"))

    def _dense(self, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, self._span_lengths)

    @cached_property
    def source_T(self) -> np.ndarray:
        """(T,) int8: code of the token source, its place in SOURCES."""
        names = self.spans.field("source").dictionary_encode()
        codes = np.array([SOURCES.index(name) for name in names.dictionary.to_pylist()], np.int8)
        return self._dense(codes[np.asarray(names.indices)])

    @cached_property
    def is_trainable_T(self) -> np.ndarray:
        """(T,) bool: may reach the gradient."""
        return self._dense(self.spans.field("trainable").to_numpy(zero_copy_only=False).astype(bool))

    @cached_property
    def is_sampled_T(self) -> np.ndarray:
        """(T,) bool: sampled by the policy."""
        return np.asarray(self.source_T == SOURCES.index(TokenSource.POLICY))

    @cached_property
    def policy_version_T(self) -> np.ndarray:
        """(T,) int32: version of the weights that sampled the token; -1 where not sampled."""
        return self._dense(_or_minus_one(self.spans.field("policy_version")))

    @cached_property
    def kv_version_T(self) -> np.ndarray:
        """(T,) int32: oldest version among the attended cache entries; -1 where not sampled."""
        return self._dense(_or_minus_one(self.spans.field("kv_version")))

    @cached_property
    def turn_T(self) -> np.ndarray:
        """(T,) int32: model call of the token."""
        return self._dense(_or_minus_one(self.spans.field("turn")))

    def column(self, name: str) -> pa.ChunkedArray:
        """A scalar column."""
        return self.scalars[name]


def _or_minus_one(values: pa.Array) -> np.ndarray:
    return np.asarray(values.fill_null(-1)) if values.null_count else np.asarray(values)


def _list_parts(column: pa.ListArray) -> tuple[pa.Array, np.ndarray]:
    """Values that the lists span, and offsets from 0."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    return column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), offsets - offsets[0]


def _logprobs(values: pa.Array) -> np.ndarray:
    """float32 with NaN where null; a view of the Arrow buffer when nothing is null."""
    if values.null_count == 0:
        return np.asarray(values.to_numpy(zero_copy_only=True))
    return np.asarray(values.to_numpy(zero_copy_only=False))


def verify_rows(rows: pa.RecordBatch, where: str) -> None:
    """Raise CorruptLogError, naming file and rows, unless every row has the digest it was written with."""
    stored = rows["digest"].to_pylist()
    wrong = [place for place, (kept, made) in enumerate(zip(stored, row_digests(rows), strict=True)) if kept != made]
    if wrong:
        lsn = rows["lsn"].to_pylist()
        named = ", ".join(f"lsn {lsn[place]}" for place in wrong[:5])
        raise CorruptLogError(
            f"{where}: {len(wrong)} of {rows.num_rows} rows fail their digest ({named}); run molt verify, then molt fsck --repair"
        )


def refuse_emptied(rows: pa.RecordBatch) -> None:
    """Raise LogError, naming the first, when tokens of a segment were taken out of the log: that is no damage, and nothing to train on."""
    empty = np.asarray(pc.equal(pc.list_value_length(rows["token_ids"]), 0)) & (np.asarray(rows["n_tokens"]) > 0)
    if empty.any():
        name = rows["segment_id"][int(empty.argmax())]
        raise LogError(f"segment_id={name}: its tokens were taken out of the log (rows_emptied); it cannot be trained on")


def one_batch(rows: pa.Table) -> pa.RecordBatch:
    """The table as one batch."""
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema)


def from_rows(rows: pa.RecordBatch) -> SegmentBatch:
    """Rows of the segments table as a batch."""
    ids, offsets = _list_parts(rows["token_ids"])
    logprobs, _ = _list_parts(rows["behaviour_logprobs"])
    spans, span_offsets = _list_parts(rows["spans"])
    names = [name for name in rows.schema.names if name not in HEAVY]
    return SegmentBatch(
        token_ids_T=np.asarray(ids.to_numpy(zero_copy_only=True)),
        behaviour_logprobs_T=_logprobs(logprobs),
        offsets_S=offsets,
        spans=spans,
        span_offsets_S=span_offsets,
        scalars=pa.Table.from_batches([rows.select(names)]),
    )


def batch_of(
    dataset: lance.LanceDataset, row_ids: Sequence[int], segment_ids: Sequence[str], *, verify: bool, columns: Sequence[str] | None = None
) -> SegmentBatch:
    """The rows at those row ids, in that order."""
    with damage_named(f"{dataset.uri}: segments {segment_ids[0]} .. {segment_ids[-1]}"):
        rows = one_batch(dataset._take_rows(list(row_ids), columns=None if columns is None else list({*columns, *NEEDED})))
    if rows["segment_id"].to_pylist() != list(segment_ids):
        raise CorruptLogError(f"{dataset.uri}: rows {list(row_ids)[:5]} do not hold the segments asked for; run molt verify")
    refuse_emptied(rows)
    if verify:
        verify_rows(rows, f"{dataset.uri}: version {dataset.version}")
    return from_rows(rows)
