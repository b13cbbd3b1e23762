"""What waits to be committed: the order of each producer, repetitions, conflicts and the bound on bytes.

accept -> early (its predecessor is missing) -> ready (next in order) -> taken (in the group being committed) -> acknowledged
                                                   ^                          |
                                                   +------ put_back ----------+   the group failed before it was decided
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from molt.errors import ConflictingAppendError, LogError
from molt.log.message import Ack, Message

RECENT = 1024
"""Digests kept in memory per producer; older ones are read back from the log."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One message and everyone who waits for its ack."""

    message: Message
    futures: list[Future[Ack]]
    arrived_at: float


@dataclass(slots=True, kw_only=True)
class ProducerState:
    """Where one producer stands."""

    next_seq: int = 0
    recent: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    early: dict[int, Entry] = field(default_factory=dict)


def conflict(message: Message) -> ConflictingAppendError:
    """The refusal of another payload under a known place."""
    return ConflictingAppendError(
        f"producer={message.producer} seq={message.seq}: another payload is already in the log under it; a resend must carry the same rows"
    )


class Inbox:
    """Not thread-safe: the writer holds its lock around every call."""

    def __init__(self, marks: dict[str, tuple[int, str]], *, max_bytes: int, read_back: Callable[[Message], bytes]) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.ready: list[Entry] = []
        self.taken: list[Entry] = []
        self.echoes: list[Entry] = []
        """Repetitions of messages that are decided but not yet acknowledged."""
        self._read_back = read_back
        self._producers = {
            name: ProducerState(next_seq=seq + 1, recent=OrderedDict({seq: bytes.fromhex(digest)} if digest else {}))
            for name, (seq, digest) in marks.items()
        }

    def has_room(self, size_bytes: int) -> bool:
        """True when a message of that size may come in; one message always may come into an empty inbox."""
        return self.held_bytes == 0 or self.held_bytes + size_bytes <= self.max_bytes

    def accept(self, message: Message, future: Future[Ack]) -> None:
        """Sort a message into repetition, conflict, next in order, or early."""
        producer = self._producers.setdefault(message.producer, ProducerState())
        entry = Entry(message=message, futures=[future], arrived_at=time.monotonic())
        if message.seq < producer.next_seq:
            self._repeat(producer, entry)
            return
        twin = producer.early.get(message.seq)
        if twin is None:
            self.held_bytes += message.size_bytes
            producer.early[message.seq] = entry
            self._promote(producer)
        elif twin.message.digest == message.digest:
            twin.futures.append(future)
        else:
            future.set_exception(conflict(message))

    def _promote(self, producer: ProducerState) -> None:
        while (entry := producer.early.pop(producer.next_seq, None)) is not None:
            producer.recent[producer.next_seq] = entry.message.digest
            if len(producer.recent) > RECENT:
                producer.recent.popitem(last=False)
            producer.next_seq += 1
            self.ready.append(entry)

    def _repeat(self, producer: ProducerState, entry: Entry) -> None:
        message, future = entry.message, entry.futures[0]
        known = producer.recent.get(message.seq) or self._read_back(message)
        if known != message.digest:
            future.set_exception(conflict(message))
            return
        for first in (*self.ready, *self.taken):
            if first.message.producer == message.producer and first.message.seq == message.seq:
                first.futures.append(future)
                return
        self.echoes.append(entry)

    def take(self, *, max_rows: int, max_bytes: int) -> list[Entry]:
        """The next group: whole messages, at least one, up to the bounds."""
        rows = size = 0
        for count, entry in enumerate(self.ready):
            rows += entry.message.num_rows
            size += entry.message.size_bytes
            if count and (rows > max_rows or size > max_bytes):
                self.taken, self.ready = self.ready[:count], self.ready[count:]
                return self.taken
        self.taken, self.ready = self.ready, []
        return self.taken

    def release(self) -> list[Entry]:
        """The taken group is committed: make room, give it back for the acks."""
        done, self.taken = self.taken, []
        self.held_bytes -= sum(entry.message.size_bytes for entry in done)
        return done

    def put_back(self) -> list[Entry]:
        """The taken group did not happen: forget its places, so that a resend is taken as new. Later messages wait as early ones."""
        failed = self.release()
        for name in {entry.message.producer for entry in failed}:
            producer = self._producers[name]
            producer.next_seq = min(entry.message.seq for entry in failed if entry.message.producer == name)
            for seq in [seq for seq in producer.recent if seq >= producer.next_seq]:
                del producer.recent[seq]
            for entry in [entry for entry in self.ready if entry.message.producer == name]:
                producer.early[entry.message.seq] = entry
                self.ready.remove(entry)
        return failed

    def overdue(self, limit_s: float) -> list[Entry]:
        """Early messages whose predecessor did not come in time; they leave the inbox."""
        now, late = time.monotonic(), []
        for producer in self._producers.values():
            for seq, entry in list(producer.early.items()):
                if now - entry.arrived_at > limit_s:
                    late.append(producer.early.pop(seq))
                    self.held_bytes -= entry.message.size_bytes
        return late

    def next_seq(self, name: str) -> int:
        """The place that the writer expects next of a producer."""
        return self._producers[name].next_seq if name in self._producers else 0

    def drain(self, error: Exception) -> None:
        """Fail everyone who waits."""
        waiting = [*self.taken, *self.ready, *self.echoes]
        for producer in self._producers.values():
            waiting += producer.early.values()
            producer.early = {}
        self.taken, self.ready, self.echoes, self.held_bytes = [], [], [], 0
        for entry in waiting:
            for future in entry.futures:
                if not future.done():
                    future.set_exception(error)


def gap_error(entry: Entry, expected: int, limit_s: float) -> LogError:
    """The refusal of a message whose predecessor never came."""
    message = entry.message
    return LogError(
        f"producer={message.producer} seq={message.seq}: seq {expected} did not arrive "
        f"within queue.gap_timeout_s={limit_s}; resend from {expected}"
    )
