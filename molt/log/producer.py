"""One sender of rows: numbers its messages, keeps each until it is acknowledged, and sends it again when an ack does not come."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import pyarrow as pa

from molt.errors import ConflictingAppendError, DataError, FencedError, LogError, LogFullError
from molt.log.crash import crashpoint
from molt.log.encode import ENCODABLE, Encoder, WrittenRows
from molt.log.message import Ack, Message
from molt.log.rows import Consumption, Event, Payload, Row, Score, Segment, to_arrow
from molt.schema import validate

_FINAL = (ConflictingAppendError, DataError, FencedError)
"""Errors that a resend cannot mend."""
_UNCLEAR = (LogError, TimeoutError, ConnectionError)
"""Errors after which the same message is sent again."""


class Sink(Protocol):
    """Where messages go: a LogWriter, or a RaySink around the log actor."""

    @property
    def run(self) -> str:
        """Name of the run."""

    @property
    def attempt(self) -> int:
        """Attempt that the writer serves."""

    def submit(self, message: Message) -> Future[Ack]:
        """Send a message; may wait while the writer has no room."""


class Producer:
    """A sender. Its name in the log is `name` and a random token, so that a restarted process never meets its own old places."""

    def __init__(
        self,
        sink: Sink,
        name: str,
        *,
        max_bytes: int = 256 << 20,
        resend_s: float = 30.0,
        num_tries: int = 20,
        is_validating: bool = True,
        encoder: Encoder | None = None,
    ) -> None:
        self.name = f"{name}.{os.urandom(4).hex()}"
        self._sink = sink
        self._max_bytes = max_bytes
        """Rows that may wait for their ack; past it append waits."""
        self._resend_s = resend_s
        self._num_tries = num_tries
        self._is_validating = is_validating
        self._encoder = encoder
        """Writes the data files here instead of in the writer; worth it from some dozens of rows a message."""
        self._next_seq = 0
        self._held_bytes = 0
        self._is_broken = False
        """True once a message ended without an ack: a later one could not be in order."""
        self._lock = threading.Condition()

    async def append(
        self,
        *,
        segments: Sequence[Segment] = (),
        scores: Sequence[Score] = (),
        events: Sequence[Event] = (),
        consumption: Sequence[Consumption] = (),
        payloads: Sequence[Payload] = (),
        is_urgent: bool = False,
    ) -> Ack:
        """Append rows as one message and return once they are durable. The order of calls is the order in the log."""
        message = self._message(segments, scores, events, consumption, payloads, is_urgent)
        loop = asyncio.get_running_loop()
        is_known = False
        try:
            if self._has_room_now(message):
                future = self._sink.submit(message)
            else:
                future = await loop.run_in_executor(None, self._sink.submit, message)
            for pause in self._pauses():
                try:
                    async with asyncio.timeout(self._resend_s):
                        ack = await asyncio.shield(asyncio.wrap_future(future))
                except _UNCLEAR as error:
                    if isinstance(error, _FINAL):
                        raise
                    if pause is None:
                        raise self._given_up(message, error) from error
                else:
                    is_known = True
                    crashpoint("producer.after_ack")
                    return ack
                await asyncio.sleep(pause)
                future = await loop.run_in_executor(None, self._sink.submit, message)
            raise AssertionError("the last pause is None")
        finally:
            self._forget(message, is_known=is_known)

    def append_sync(
        self,
        *,
        segments: Sequence[Segment] = (),
        scores: Sequence[Score] = (),
        events: Sequence[Event] = (),
        consumption: Sequence[Consumption] = (),
        payloads: Sequence[Payload] = (),
        is_urgent: bool = True,
    ) -> Ack:
        """append() for code without an event loop; it asks for a commit at once, since its caller stands still."""
        return self.send(self._message(segments, scores, events, consumption, payloads, is_urgent))

    def prepare(self, *, scores: Sequence[Score], events: Sequence[Event]) -> Message:
        """Encode rows and take their place among this producer's messages; send() it before whatever was prepared later."""
        return self._message((), scores, events, (), (), True)

    def send(self, message: Message) -> Ack:
        """Send a prepared message and return once it is durable."""
        is_known = False
        try:
            for pause in self._pauses():
                try:
                    ack = self._sink.submit(message).result(timeout=self._resend_s)
                except _UNCLEAR as error:
                    if isinstance(error, _FINAL):
                        raise
                    if pause is None:
                        raise self._given_up(message, error) from error
                else:
                    is_known = True
                    crashpoint("producer.after_ack")
                    return ack
                time.sleep(pause)
            raise AssertionError("the last pause is None")
        finally:
            self._forget(message, is_known=is_known)

    def _pauses(self) -> Iterator[float | None]:
        """Seconds before each resend; None after the last."""
        for number in range(self._num_tries - 1):
            yield min(0.05 * 2**number, 2.0)
        yield None

    def _given_up(self, message: Message, error: Exception) -> LogError:
        kind = LogFullError if isinstance(error, LogFullError) else LogError
        return kind(
            f"producer={self.name} seq={message.seq}: no ack after {self._num_tries} tries, last {type(error).__name__}: {error}; "
            "whether it is in the log is open, so this producer takes no more rows"
        )

    def _has_room_now(self, message: Message) -> bool:
        has_room = getattr(self._sink, "has_room", None)
        return has_room is None or bool(has_room(message.size_bytes))

    def _message(
        self,
        segments: Sequence[Segment],
        scores: Sequence[Score],
        events: Sequence[Event],
        consumption: Sequence[Consumption],
        payloads: Sequence[Payload],
        is_urgent: bool,
    ) -> Message:
        given: dict[str, Sequence[Row]] = {
            "payloads": payloads,
            "segments": segments,
            "scores": scores,
            "events": events,
            "consumption": consumption,
        }
        with self._lock:
            if self._is_broken:
                raise LogError(f"producer={self.name}: an earlier message ended without an ack; make a new Producer")
            seq = self._next_seq
            tables = {name: self._batch(name, rows, seq) for name, rows in given.items() if rows}
            message = Message.of(self.name, seq, self._sink.attempt, tables, is_urgent=is_urgent)
            if self._held_bytes and self._held_bytes + message.size_bytes > self._max_bytes:
                raise LogError(
                    f"producer={self.name}: {self._held_bytes} bytes wait for their ack, "
                    f"max_bytes={self._max_bytes}; await earlier appends first"
                )
            self._held_bytes += message.size_bytes
            self._next_seq += 1
        crashpoint("producer.before_send")
        return message

    def _batch(self, table: str, rows: Sequence[Row], seq: int) -> pa.RecordBatch | WrittenRows:
        batch = to_arrow(table, rows, run=self._sink.run, attempt=self._sink.attempt, producer=self.name, seq=seq)
        if self._is_validating:
            validate(table, batch.append_column("lsn", pa.array([0] * len(rows), pa.int64())))
        return self._encoder.write(table, batch) if self._encoder is not None and table in ENCODABLE else batch

    def _forget(self, message: Message, *, is_known: bool) -> None:
        with self._lock:
            self._held_bytes -= message.size_bytes
            self._is_broken |= not is_known
