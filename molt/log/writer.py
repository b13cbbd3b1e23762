"""The one writer of a run: takes messages from many producers, commits them in groups, acknowledges each once it is durable.

producers --submit--> inbox (bounded by bytes) --first of window, bytes, rows, urgent--> group --commit--> acks --> upkeep
             ^                                                                             |
             +---------- waits while the inbox is full (limit: queue.gap_timeout_s) <-----+

One thread commits. A repetition is acknowledged without a write; another payload under a known (producer, seq) is an error.
A full disk fails the group and the writer goes on; a lost lease or a failed sync stops it for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from molt.errors import DataError, FencedError, LogError, LogFullError, MoltError
from molt.log.core import LogCore, Rows, open_core
from molt.log.crash import crashpoint
from molt.log.encode import ENCODABLE, WrittenRows
from molt.log.inbox import Entry, Inbox, gap_error
from molt.log.message import Ack, Message, message_digest
from molt.log.retention import apply_retention
from molt.log.rows import event, to_arrow
from molt.log.store import RetentionSettings, Store, load_store
from molt.log.upkeep import Upkeep
from molt.schema import TABLES, arrow_schema

T = TypeVar("T")
_RETENTION_GROUPS = 64
"""Groups between two looks at what the profile does not keep."""


class LogWriter:
    """Thread-safe: every public method may be called from any thread."""

    def __init__(self, core: LogCore) -> None:
        self._core = core
        self._store = core.store
        self._lock = threading.Condition()
        self._inbox = Inbox(core.state.marks, max_bytes=core.store.queue.max_bytes, read_back=self._read_back)
        self._upkeep = Upkeep(core)
        self._columns = {name: {column.name: column.type for column in arrow_schema(name) if column.name != "lsn"} for name in TABLES}
        self._apart = 0
        """Messages still to be committed one by one, after a group failed for a reason that may lie in one of them."""
        self._facts = [
            event("log_healed", table_name=item.table, version=item.version, quarantined=list(item.quarantined)) for item in core.healings
        ]
        """What the writer itself has to tell and could not yet."""
        self._jobs: list[tuple[Future[Any], Callable[[], None]]] = []
        self._retained_at = core.state.group
        self._is_flushing = False
        self._is_closing = False
        self._is_stopped = False
        self._failure: MoltError | None = None
        with suppress(LogFullError):  # a full disk puts it off
            self._tell()
            if core.is_new_attempt:
                apply_retention(core, is_beginning=True)
        self._thread = threading.Thread(target=self._loop, name="molt-log-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, run_dir: str | Path, *, run: str, attempt: int = 1, store: str | Store = "durable", steal: bool = False) -> LogWriter:
        """Open or make the log of a run: takes the lease, completes a decided group, fences off any older writer."""
        profile = store if isinstance(store, Store) else load_store(store)
        core = open_core(run_dir, profile, run=run, attempt=attempt, steal=steal)
        try:
            return cls(core)
        except BaseException:
            core.close()
            raise

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._core.run

    @property
    def attempt(self) -> int:
        """Attempt that this writer serves."""
        return self._core.state.attempt

    @property
    def lsn_end(self) -> int:
        """Largest committed lsn; -1 for an empty log."""
        return self._core.state.lsn_end

    def has_room(self, size_bytes: int) -> bool:
        """True when a message of that size would not wait."""
        with self._lock:
            return self._inbox.has_room(size_bytes)

    def submit(self, message: Message) -> Future[Ack]:
        """Queue a message; waits while the inbox is full. The future gives the ack, or the error that kept it out of the log."""
        future: Future[Ack] = Future()
        size, limit = message.size_bytes, self._store.queue.gap_timeout_s
        with self._lock:
            has_room = self._lock.wait_for(lambda: self._inbox.has_room(size) or self._refusal() is not None, timeout=limit)
            refusal = self._refusal()
            if refusal is not None:
                future.set_exception(refusal)
            elif not has_room:
                future.set_exception(
                    LogError(f"queue.max_bytes={self._store.queue.max_bytes}: no room for {limit} s; the store is too slow, resend later")
                )
            elif message.attempt != self.attempt:
                future.set_exception(
                    FencedError(f"producer={message.producer}: attempt={message.attempt} is over, {self.attempt} is running; stop it")
                )
            elif (misfit := self._misfit(message)) is not None:
                future.set_exception(misfit)
            else:
                self._inbox.accept(message, future)
                self._lock.notify_all()
        return future

    def _misfit(self, message: Message) -> DataError | None:
        """Why the rows of a message do not fit their tables; it must not fail the group that it would be in."""
        for name, rows in message.tables.items():
            expected = self._columns.get(name)
            if expected is None or (isinstance(rows, WrittenRows) and name not in ENCODABLE):
                return DataError(f"producer={message.producer} seq={message.seq}: {name!r} takes no such rows")
            if isinstance(rows, WrittenRows):
                continue
            found = {column.name: column.type for column in rows.schema}
            wrong = sorted(column for column in expected | found if expected.get(column) != found.get(column))
            if wrong:
                return DataError(
                    f"producer={message.producer} seq={message.seq}: column {wrong[0]!r} of {name} is {found.get(wrong[0])}, "
                    f"the log has {expected.get(wrong[0])}; encode with the molt that writes the log"
                )
        return None

    def _refusal(self) -> MoltError | None:
        if self._failure is not None:
            return self._failure
        return LogError(f"log={self._core.home.where}: the writer is closed") if self._is_closing else None

    def _read_back(self, message: Message) -> bytes:
        """Digest of a committed message, from its rows."""
        rows: dict[str, list[bytes]] = {}
        sender = message.producer.replace("'", "''")
        for name, table in self._core.tables.items():
            found = table.dataset.to_table(columns=["lsn", "digest"], filter=f"producer = '{sender}' and seq = {message.seq}")
            if len(found):
                rows[name] = found.sort_by("lsn")["digest"].to_pylist()
        return message_digest(rows)

    def between_commits(self, job: Callable[[LogCore], T]) -> Future[T]:
        """Run a job in the writer's thread while no group is half committed: sealing, retention, compaction."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._core.roll_forward()
                future.set_result(job(self._core))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            refusal = self._refusal()
            if refusal is not None:
                future.set_exception(refusal)
            else:
                self._jobs.append((future, run))
                self._lock.notify_all()
        return future

    def flush(self, *, timeout_s: float = 60.0) -> None:
        """Commit everything submitted so far."""
        with self._lock:
            futures = [future for entry in (*self._inbox.taken, *self._inbox.ready) for future in entry.futures]
            self._is_flushing = bool(futures)
            self._lock.notify_all()
        limit = time.monotonic() + timeout_s
        for future in futures:
            future.exception(timeout=max(0.0, limit - time.monotonic()))

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Commit what is queued, stop, give the lease back. Closing twice is harmless."""
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            self._lock.notify_all()
        self._thread.join(timeout=timeout_s)
        if not was_closing:
            self._core.close()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _loop(self) -> None:
        while True:
            with self._lock:
                group = self._next_group()
            if group is None:
                with suppress(MoltError):
                    self._tell()
                return
            try:
                self._commit(group)
                self._keep_up()
                while self._jobs:
                    self._jobs.pop(0)[1]()
            except (LogFullError, FencedError, LogError) as error:
                self._fail(group, error, is_fatal=isinstance(error, FencedError))
            except BaseException as error:  # also a panic of Lance: the writer must not die in silence, whoever waits learns why
                self._fail(group, LogError(f"log={self._core.home.where}: {type(error).__name__}: {error}"), is_fatal=True)
            if self._failure is not None:
                return

    def _next_group(self) -> list[Entry] | None:
        """Wait for a group to be due; None when the writer is closed and nothing is left. Holds the lock."""
        commit = self._store.commit
        while True:
            for entry in self._inbox.overdue(self._store.queue.gap_timeout_s):
                error = gap_error(entry, self._inbox.next_seq(entry.message.producer), self._store.queue.gap_timeout_s)
                for future in entry.futures:
                    if not future.done():
                        future.set_exception(error)
            ready = self._inbox.ready
            if not ready:
                self._is_flushing = False
                if self._inbox.echoes or self._jobs:
                    return []
                if self._is_closing:
                    self._inbox.drain(LogError(f"log={self._core.home.where}: the writer closed before the messages in front arrived"))
                    return None
                self._lock.wait(timeout=1.0)
                continue
            left = ready[0].arrived_at + commit.window_ms / 1000 - time.monotonic()
            is_due = (
                left <= 0
                or self._is_flushing
                or self._is_closing
                or sum(entry.message.num_rows for entry in ready) >= commit.max_rows
                or sum(entry.message.size_bytes for entry in ready) >= commit.max_bytes
                or any(entry.message.is_urgent for entry in ready)
            )
            if is_due:
                if self._apart:
                    self._apart -= 1
                    return self._inbox.take(max_rows=1, max_bytes=1)
                return self._inbox.take(max_rows=commit.max_rows, max_bytes=commit.max_bytes)
            self._lock.wait(timeout=left)

    def _commit(self, group: list[Entry]) -> None:
        """Commit a group and acknowledge it, or complete what an earlier one owes."""
        if group:
            rows: dict[str, list[Rows]] = {}
            marks: dict[str, tuple[int, str]] = {}
            for entry in group:
                marks[entry.message.producer] = (entry.message.seq, entry.message.digest.hex())
                for name, batch in entry.message.tables.items():
                    rows.setdefault(name, []).append(batch)
            self._core.lease.check()
            self._core.commit_group(rows, marks)
        else:
            self._core.roll_forward()
        crashpoint("writer.before_ack")
        with self._lock:
            done = self._inbox.release()
            echoes, self._inbox.echoes = self._inbox.echoes, []
            self._lock.notify_all()
        for entry in done:
            self._acknowledge(entry, is_repetition=False)
        for entry in echoes:
            self._acknowledge(entry, is_repetition=True)
        crashpoint("writer.after_ack")

    def _keep_up(self) -> None:
        """Upkeep between commits. A full disk puts it off; the alarms go into the log."""
        with suppress(LogFullError):
            self._facts += [
                event("log_alarmed", table_name=alarm.table, what=alarm.what, value=alarm.value, bound=alarm.limit)
                for alarm in self._upkeep.run()
            ]
            self._tell()
            if self._store.retention != RetentionSettings() and self._core.state.group >= self._retained_at + _RETENTION_GROUPS:
                apply_retention(self._core)
                self._retained_at = self._core.state.group

    def _tell(self) -> None:
        """Commit the facts of the writer itself; those of a group that failed are told with the next one."""
        if not self._facts:
            return
        core, before = self._core, self._core.state.group
        producer = f"log.{core.state.epoch}.{before}"
        rows = to_arrow("events", self._facts, run=self.run, attempt=self.attempt, producer=producer, seq=0)
        try:
            core.commit_group({"events": [rows]}, {})
        finally:
            if core.state.group > before:  # decided: what it owes is completed before the next group
                self._facts = []

    def _acknowledge(self, entry: Entry, *, is_repetition: bool) -> None:
        state = self._core.state
        ack = Ack(
            producer=entry.message.producer,
            seq=entry.message.seq,
            group=state.group,
            lsn_end=state.lsn_end,
            is_repetition=is_repetition,
        )
        for future in entry.futures:
            if not future.done():
                future.set_result(ack)

    def _fail(self, group: list[Entry], error: LogError, *, is_fatal: bool) -> None:
        """Tell whoever waits. A group that was decided stays known: its resend is acknowledged once the rest is committed."""
        is_decided = bool(group) and self._core.state.marks.get(group[-1].message.producer, (-1, ""))[0] >= group[-1].message.seq
        with self._lock:
            if is_fatal or not group:  # nothing but jobs was there to be done
                jobs, self._jobs = self._jobs, []
                for job, _ in jobs:
                    if job.set_running_or_notify_cancel():
                        job.set_exception(error)
            if is_fatal:
                self._failure = error
                self._inbox.drain(error)
            else:
                failed = self._inbox.release() if is_decided else self._inbox.put_back()
                if len(group) > 1 and not is_decided and not isinstance(error, LogFullError):
                    self._apart = 2 * len(group)
                echoes, self._inbox.echoes = self._inbox.echoes, []
                for entry in (*failed, *echoes):
                    for future in entry.futures:
                        if not future.done():
                            future.set_exception(error)
            self._lock.notify_all()
