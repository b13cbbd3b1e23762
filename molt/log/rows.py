"""Rows of the log as dataclasses, and their turning into Arrow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from molt.errors import DataError
from molt.log.digest import bytes_digest, row_digests
from molt.schema import FILLED_BY_LOG, arrow_schema, event_kinds


class TokenSource(StrEnum):
    """Who wrote a token."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    OBSERVATION = "observation"
    TEMPLATE = "template"
    """Glue of the chat template."""
    POLICY = "policy"
    """Sampled by the policy: the only source that may be trainable."""
    HISTORY = "history"
    """A turn of an earlier segment shown again in a rewritten history; its ids are as sampled, and it is never trainable."""
    COMPACTION = "compaction"
    IMAGE = "image"
    """Its embedding is a feature of an image; the markers around it are glue of the template."""
    DEMONSTRATION = "demonstration"
    """An assistant turn of a data set, for supervised steps: trainable, and not sampled by the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens of equal lineage."""

    len: int
    source: TokenSource
    trainable: bool = False
    policy_version: int | None = None
    """None where not sampled."""
    kv_version: int | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One payload of an image of a segment, and the tokens that stand for the image."""

    name: str
    """image: the encoded bytes; else what the model calls the tensor that its processor made of it."""
    payload_digest: str
    position: int
    """First token, markers included."""
    len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One token-exact segment of a rollout. What follows from spans and arrays is a property, so it cannot disagree."""

    rollout_id: str
    group_id: str
    segment_index: int
    num_segments: int
    member: int
    group_size: int
    prompt_id: str
    prompt_index: int
    epoch: int
    purpose: str = "train"
    opened_by: str = "start"
    token_ids: np.ndarray
    """(n_tokens,) int32."""
    behaviour_logprobs: np.ndarray
    """(n_tokens,) float32, nats; NaN where not sampled is stored as null."""
    spans: Sequence[Span]
    reward: float | None
    outcome: float | None = None
    is_terminated: bool
    is_truncated: bool
    stop_reason: str
    metrics: dict[str, float] = field(default_factory=dict)
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    logprobs_mode: str = "processed"
    engine: str
    tokenizer_digest: str
    template_digest: str
    routing_digest: str | None = None
    media: Sequence[Medium] | None = None
    """None without images."""
    started_at: float
    finished_at: float

    @property
    def segment_id(self) -> str:
        """Name of the segment: rollout_id and segment_index."""
        return f"{self.rollout_id}/{self.segment_index}"

    @property
    def n_tokens(self) -> int:
        """Tokens."""
        return len(self.token_ids)

    @property
    def n_sampled(self) -> int:
        """Tokens sampled by the policy."""
        return sum(span.len for span in self.spans if span.source == TokenSource.POLICY)

    @property
    def n_trainable(self) -> int:
        """Tokens that may reach the gradient."""
        return sum(span.len for span in self.spans if span.trainable)

    @property
    def num_turns(self) -> int:
        """Model calls in this segment."""
        return len({span.turn for span in self.spans if span.source == TokenSource.POLICY})

    @property
    def version_min(self) -> int | None:
        """Oldest policy version among sampled tokens."""
        return min((span.policy_version for span in self.spans if span.policy_version is not None), default=None)

    @property
    def version_max(self) -> int | None:
        """Newest policy version among sampled tokens."""
        return max((span.policy_version for span in self.spans if span.policy_version is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the trainer computed for one segment at one step. Arrays run over the sampled tokens, float32."""

    step: int
    policy_version: int
    segment_id: str
    rank: int
    trainer_logprobs: np.ndarray
    reference_logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    advantages: np.ndarray
    gate_weights: np.ndarray

    @property
    def n_sampled(self) -> int:
        """Tokens sampled by the policy."""
        return len(self.trainer_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """One segment consumed at one step."""

    step: int
    segment_id: str
    rollout_id: str
    group_id: str
    policy_version: int
    rank: int
    micro_batch: int
    position: int
    use_number: int = 1
    n_sampled: int
    n_kept: int
    lag: int | None
    cursor: int


ZSTD = "+zstd"
"""What follows the dtype of an array that is stored compressed."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One blob, named by its content; the name is computed once (no slots, so that it can be kept)."""

    kind: str
    """routing, image or tensor."""
    data: bytes
    shape: tuple[int, ...] = ()
    dtype: str = "bytes"

    @classmethod
    def of_array(cls, kind: str, array: np.ndarray, *, is_compressed: bool = False) -> Payload:
        """The payload that holds an array, C order, little endian. is_compressed: for large ones of few different values."""
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        data, dtype = little.tobytes(), little.dtype.str
        if is_compressed:
            data, dtype = pa.Codec("zstd", compression_level=1).compress(data, asbytes=True), dtype + ZSTD
        return cls(kind=kind, data=data, shape=tuple(array.shape), dtype=dtype)

    def to_array(self) -> np.ndarray:
        """The array in it, read-only."""
        dtype, data = np.dtype(self.dtype.removesuffix(ZSTD)), self.data
        if self.dtype.endswith(ZSTD):
            data = pa.Codec("zstd").decompress(data, math.prod(self.shape) * dtype.itemsize, asbytes=True)
        return np.frombuffer(data, dtype).reshape(self.shape)

    @cached_property
    def payload_digest(self) -> str:
        """Name of the payload."""
        return payload_name(self.kind, self.shape, self.dtype, self.data)

    @property
    def size_bytes(self) -> int:
        """Length of data in bytes."""
        return len(self.data)


def payload_name(kind: str, shape: Sequence[int], dtype: str, data: bytes) -> str:
    """blake2b-128 hex of kind, shape, dtype and data."""
    return bytes_digest(f"{kind}|{','.join(map(str, shape))}|{dtype}|".encode(), data).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fact. Make it with event(), which checks the columns of its kind."""

    kind: str
    happened_at: float
    step: int | None = None
    policy_version: int | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    segment_id: str | None = None
    body: dict[str, Any]


Row = Segment | Score | Consumption | Payload | Event


@cache
def _kind_columns(kind: str) -> dict[str, pa.Field]:
    kinds = event_kinds()
    if kind not in kinds:
        raise DataError(f"event kind={kind!r} has no file schemas/events/{kind}.sql; known: {', '.join(kinds)}")
    return {column.name: column.arrow for column in kinds[kind].columns}


def event(
    kind: str,
    *,
    step: int | None = None,
    policy_version: int | None = None,
    group_id: str | None = None,
    rollout_id: str | None = None,
    segment_id: str | None = None,
    happened_at: float | None = None,
    **body: Any,
) -> Event:
    """A fact of that kind. A column that the kind shares with the envelope (step, group_id ...) is said once and stands in both."""
    columns = _kind_columns(kind)
    given: dict[str, Any] = {
        "step": step,
        "policy_version": policy_version,
        "group_id": group_id,
        "rollout_id": rollout_id,
        "segment_id": segment_id,
    }
    full = {name: value for name, value in given.items() if name in columns and value is not None} | body
    unknown = sorted(set(full) - set(columns))
    if unknown:
        raise DataError(f"event kind={kind}: column {unknown[0]!r} is not in schemas/events/{kind}.sql; its columns: {', '.join(columns)}")
    for name, column in columns.items():
        value = full.setdefault(name, None)
        if value is None:
            if not column.nullable:
                raise DataError(f"event kind={kind}: column {name!r} is missing and may not be null; give it a value")
            continue
        if isinstance(value, str):  # a name of a file in an error may be no Unicode; the fact must stand all the same
            value = full[name] = value.encode("utf-8", "backslashreplace").decode()
        try:
            pa.array([value], type=column.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(f"event kind={kind}: {name}={value!r} is not a {column.type}; {error}") from error
    return Event(kind=kind, happened_at=time.time() if happened_at is None else happened_at, body=full, **given)


def _encode_json(value: dict[str, Any]) -> str:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS).decode()


def _float_list(cells: list[np.ndarray | None]) -> pa.Array:
    """list<float32> without a Python list; NaN becomes null, None becomes a null list."""
    return _number_list(cells, np.float32, pa.float32())


def _number_list(cells: list[np.ndarray | None], dtype: Any, kind: pa.DataType) -> pa.Array:
    arrays = [np.zeros(0, dtype) if cell is None else np.ascontiguousarray(cell, dtype=dtype).reshape(-1) for cell in cells]
    offsets = np.zeros(len(cells) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    missing = np.isnan(joined) if dtype == np.float32 else None
    values = pa.array(joined, type=kind, mask=missing if missing is not None and missing.any() else None)
    absent = np.array([cell is None for cell in cells])
    return pa.ListArray.from_arrays(
        pa.array(offsets), values, type=pa.list_(pa.field("item", kind)), mask=pa.array(absent) if absent.any() else None
    )


def _span_list(cells: list[Sequence[Span]], kind: pa.DataType) -> pa.Array:
    spans = [span for cell in cells for span in cell]
    offsets = np.zeros(len(cells) + 1, np.int32)
    np.cumsum([len(cell) for cell in cells], out=offsets[1:])
    struct = kind.value_type
    children = [pa.array([getattr(span, child.name) for span in spans], type=child.type) for child in struct]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(children, fields=list(struct)), type=kind)


def _column(name: str, kind: pa.DataType, cells: list[Any]) -> pa.Array:
    if name == "spans":
        return _span_list(cells, kind)
    if name == "media":
        return pa.array([None if cell is None else [asdict(medium) for medium in cell] for cell in cells], type=kind)
    if name in ("metrics", "body"):
        return pa.array([_encode_json(cell) for cell in cells], type=kind)
    if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
        return _float_list(cells)
    if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
        return _number_list(cells, np.int32, kind.value_type)
    return pa.array(cells, type=kind)


def to_arrow(table: str, rows: Sequence[Row], *, run: str, attempt: int, producer: str, seq: int) -> pa.RecordBatch:
    """The rows with who sent them and their digests; the writer adds the lsn."""
    schema = arrow_schema(table)
    sent: dict[str, Callable[[], pa.Array]] = {
        "run": lambda: pa.array([run] * len(rows), pa.string()),
        "attempt": lambda: pa.array([attempt] * len(rows), pa.int32()),
        "producer": lambda: pa.array([producer] * len(rows), pa.string()),
        "seq": lambda: pa.array([seq] * len(rows), pa.int64()),
    }
    fields = [column for column in schema if column.name not in ("lsn", "digest")]
    arrays = [
        sent[column.name]()
        if column.name in FILLED_BY_LOG
        else _column(column.name, column.type, [getattr(row, column.name) for row in rows])
        for column in fields
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return batch.append_column(schema.field("digest"), pa.array(row_digests(batch), pa.binary()))
