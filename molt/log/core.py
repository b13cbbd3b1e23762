"""The five tables as one log: opening, rolling a decided group forward, and committing the next group in causal order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
from lance.fragment import FragmentMetadata

from molt.errors import CorruptLogError, FencedError, LogError
from molt.log.crash import crashpoint
from molt.log.descriptor import ensure_descriptor, read_descriptor
from molt.log.encode import WrittenRows
from molt.log.heal import Healing, heal_table
from molt.log.home import FULL, Home, LocalHome, find_home, full_error, home_of
from molt.log.lease import take_lease
from molt.log.stamp import LogState, Stamp, newest_stamp
from molt.log.store import Store
from molt.log.table import LogTable
from molt.log.tombstone import KIND, LOST, tombstones_of
from molt.log.upcast import missing_columns, refuse_newer
from molt.schema import TABLES, arrow_schema

Rows: TypeAlias = pa.RecordBatch | WrittenRows
"""Rows of a message: in memory, or in a file that the producer wrote."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """What a decided group still owes: tables whose rows are written and synced, and not yet committed."""

    stamp: Stamp
    rest: dict[str, tuple[list[FragmentMetadata], int]] = field(default_factory=dict)
    """By table: fragments and rows_end."""


def decoded_fragments(encoded: list[Any]) -> list[FragmentMetadata]:
    """Fragments from an intent."""
    return [FragmentMetadata.from_json(orjson.dumps(fragment).decode()) for fragment in encoded]


class LogCore:
    """What one writer holds: lease, tables, state. Used by one thread at a time."""

    def __init__(
        self, home: Home, store: Store, *, run: str, attempt: int | None, steal: bool = False, healed: Sequence[Healing] | None = None
    ) -> None:
        self.home, self.store, self.run = home, store, run
        self._is_repairing = healed is not None
        self.is_new_attempt = False
        """Whether no process of this attempt has written yet."""
        self.healings: list[Healing] = list(healed or ())
        """Manifests that were set aside, here or by a repair before."""
        try:
            if isinstance(home, LocalHome):
                home.root.mkdir(parents=True, exist_ok=True)
            self.lease = take_lease(home, store, steal=steal)
        except OSError as error:
            raise (full_error(error, home.where) if error.errno in FULL else error) from error
        crashpoint("open.after_lease")
        try:
            ensure_descriptor(home, store, run)
            self.tables = {name: LogTable(home, name, store.codec) for name in TABLES}
            self.state = LogState()
            self.pending: Pending | None = None
            self._open(attempt)
            self._known_payloads: set[str] | None = None
        except BaseException:
            self.lease.release()
            raise

    def _open(self, attempt: int | None) -> None:
        for tries in range(5):
            stamps = {name: self._open_table(table) for name, table in self.tables.items()}
            if any(healing.redo for healing in self.healings):
                stamps = self._redo(stamps)
            self._adopt(stamps)
            attempt = max(self.state.attempt, 1) if attempt is None else attempt
            if attempt < self.state.attempt:
                raise FencedError(f"log={self.home.where}: attempt={attempt} is over, {self.state.attempt} has begun; stop this one")
            try:
                crashpoint("open.before_roll_forward")
                self._check_whole()
                self.roll_forward()
                for table in self.tables.values():
                    self._evolve(table)
                self._begin(attempt)
                return
            except FencedError:
                if tries == 4:
                    raise

    def _open_table(self, table: LogTable) -> Stamp:
        try:
            exists = table.open()
        except (ValueError, OSError) as error:
            if isinstance(error, CorruptLogError):
                raise
            healing = heal_table(self.home, table.name)
            if healing is None:
                raise
            self.healings.append(healing)
            exists = table.open()
        if not exists:
            empty = LogState(rows_end={table.name: 0})
            table.create(empty.stamp(table.name, "epoch"))
        return newest_stamp(table.dataset)

    def _redo(self, stamps: dict[str, Stamp]) -> dict[str, Stamp]:
        """Make commits again that were lost with a torn manifest: the head of a group from its own intent; the rest is rolled forward."""
        for healing in self.healings:
            for stamp in healing.redo:
                part = (stamp.intent or {}).get(healing.table)
                newest = max(known.group for known in stamps.values())
                if part is not None and stamps[healing.table].group < stamp.group <= newest + 1:
                    self.tables[healing.table].commit(decoded_fragments(part["fragments"]), stamp)
                    stamps[healing.table] = stamp
        return stamps

    def _adopt(self, stamps: dict[str, Stamp]) -> None:
        """Take the state from the newest stamps and find what the newest group still owes."""
        newest = max(stamp.group for stamp in stamps.values())
        at_newest = {name: stamp for name, stamp in stamps.items() if stamp.group == newest}
        marked = next((stamp for stamp in at_newest.values() if stamp.marks is not None), None)
        if marked is None and self._is_repairing:
            self._adopt_from_rows(stamps)
            return
        if marked is None:
            raise LogError(f"log={self.home.where}: no table holds the marks of group {newest}; run molt fsck")
        self.state = LogState(
            epoch=max(stamp.epoch for stamp in stamps.values()),
            attempt=max(stamp.attempt for stamp in stamps.values()),
            group=newest,
            lsn_end=marked.lsn_end,
            rows_end={name: stamp.rows_end for name, stamp in stamps.items()},
            marks=dict(marked.marks or {}),
        )
        head = next((stamp for stamp in at_newest.values() if stamp.intent), None)
        self.pending = None
        if head is not None and head.intent is not None:
            rest = {
                name: (decoded_fragments(part["fragments"]), int(part["rows_end"]))
                for name, part in head.intent.items()
                if stamps[name].group < newest
            }
            self.pending = Pending(stamp=head, rest=rest)

    def _check_whole(self) -> None:
        """CorruptLogError when tables were appended fewer rows than the log has places: one is missing, or older than the others."""
        owed = sum(item.physical_rows for fragments, _ in (self.pending.rest if self.pending else {}).values() for item in fragments)
        missing = self.state.lsn_end + 1 - sum(self.state.rows_end.values()) - owed
        if missing <= 0 or self._is_repairing:
            return
        facts = self.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind = '{LOST}'")
        if missing > len(tombstones_of(facts).lost):
            raise CorruptLogError(
                f"log={self.home.where}: {missing} of {self.state.lsn_end + 1} rows are in no table: a table is missing or older than "
                f"the others; restore it from a copy, or run molt fsck --repair to go on without them"
            )

    def _evolve(self, table: LogTable) -> None:
        """Add columns that were declared after the table was made; refuse a table that this code would not write in full."""
        refuse_newer(table.name, table.dataset, read_descriptor(self.home))
        missing = missing_columns(table.name, table.dataset)
        strict = [column.name for column in missing if not column.nullable]
        if strict:
            raise LogError(
                f"log={self.home.where}: table {table.name} lacks column {strict[0]!r}, which may not be null; "
                f"declare it nullable or begin a new run"
            )
        if missing:
            table.add_columns(missing)
            table.commit([], self.state.stamp(table.name, "carry"))

    def _adopt_from_rows(self, stamps: dict[str, Stamp]) -> None:
        """The head of the newest group is lost: take the marks from the rows that are there, and owe nothing."""
        marks: dict[str, tuple[int, str]] = {}
        lsn_end = max(stamp.lsn_end for stamp in stamps.values())
        for table in self.tables.values():
            rows = table.dataset.to_table(columns=["producer", "seq"]).group_by("producer").aggregate([("seq", "max")])
            for producer, seq in zip(rows["producer"].to_pylist(), rows["seq_max"].to_pylist(), strict=True):
                marks[producer] = (max(seq, marks.get(producer, (-1, ""))[0]), "")
        self.state = LogState(
            epoch=max(stamp.epoch for stamp in stamps.values()),
            attempt=max(stamp.attempt for stamp in stamps.values()),
            group=max(stamp.group for stamp in stamps.values()),
            lsn_end=lsn_end,
            rows_end={name: stamp.rows_end for name, stamp in stamps.items()},
            marks=marks,
        )
        self.pending = None

    def _begin(self, attempt: int) -> None:
        """Mark every table with a new epoch: from here on an older writer meets a version that it did not expect."""
        crashpoint("open.before_epoch")
        self.is_new_attempt = attempt > self.state.attempt
        if self.is_new_attempt:
            self.state.marks = {}
        self.state.epoch += 1
        self.state.attempt = attempt
        for name, table in self.tables.items():
            table.commit([], self.state.stamp(name, "epoch"))
        for table in self.tables.values():
            self._sync(table, [])

    def _sync(self, table: LogTable, fragments: list[FragmentMetadata]) -> None:
        if self.store.is_synced:
            table.sync(fragments)

    def roll_forward(self) -> None:
        """Commit what a decided group still owes."""
        if self.pending is None:
            return
        head = self.pending.stamp
        for name, (fragments, rows_end) in list(self.pending.rest.items()):
            stamp = Stamp(
                kind="group",
                epoch=head.epoch,
                attempt=head.attempt,
                group=head.group,
                lsn_start=head.lsn_start,
                lsn_end=head.lsn_end,
                rows_end=rows_end,
            )
            self.tables[name].commit(fragments, stamp)
            self._sync(self.tables[name], [])
            self.state.rows_end[name] = rows_end
            del self.pending.rest[name]
            crashpoint("writer.between_tables")
        self.pending = None

    def commit_group(self, rows: dict[str, list[Rows]], marks: dict[str, tuple[int, str]]) -> int:
        """Commit one group over all its tables and return its last lsn. Decided by the commit of its first table: what follows is owed."""
        self.roll_forward()
        crashpoint("writer.before_data")
        written, lsn = self._write(rows)
        crashpoint("writer.after_data")
        for name, fragments in written.items():
            if fragments:
                self._sync(self.tables[name], fragments)
        crashpoint("writer.after_sync")
        self._decide(written, {name: sum(map(len, batches)) for name, batches in rows.items()}, rows, marks, lsn)
        crashpoint("writer.after_head")
        self.roll_forward()
        return self.state.lsn_end

    def _write(self, rows: dict[str, list[Rows]]) -> tuple[dict[str, list[FragmentMetadata]], int]:
        """Data files for all rows of a group, in the order of its messages; the last lsn."""
        lsn = self.state.lsn_end
        if rows.get("payloads"):
            rows["payloads"] = list(self._fresh_payloads(rows["payloads"]))
        written: dict[str, list[FragmentMetadata]] = {}
        for name in TABLES:
            for is_written, part in groupby(rows.get(name) or (), key=lambda item: isinstance(item, WrittenRows)):
                items = list(part)
                made = self._adopt_files(name, items, lsn) if is_written else self._encode(name, items, lsn)
                written.setdefault(name, []).extend(made)
                lsn += sum(map(len, items))
        return (written or {"events": []}), lsn

    def _encode(self, name: str, batches: Sequence[Rows], lsn: int) -> list[FragmentMetadata]:
        table = pa.Table.from_batches([batch for batch in batches if isinstance(batch, pa.RecordBatch)])
        order = pa.array(np.arange(lsn + 1, lsn + 1 + len(table), dtype=np.int64))
        schema = arrow_schema(name)
        columns = [order if field.name == "lsn" else table[field.name] for field in schema]
        return self.tables[name].write(pa.Table.from_arrays(columns, schema=schema), max_bytes=self.store.upkeep.target_bytes)

    def _adopt_files(self, name: str, files: Sequence[Rows], lsn: int) -> list[FragmentMetadata]:
        made = []
        for file in files:
            assert isinstance(file, WrittenRows), "grouped by kind"
            made.append(self.tables[name].adopt_file(file, lsn + 1))
            lsn += len(file)
        return made

    def _decide(
        self,
        written: dict[str, list[FragmentMetadata]],
        counts: dict[str, int],
        rows: dict[str, list[Rows]],
        marks: dict[str, tuple[int, str]],
        lsn: int,
    ) -> None:
        """Commit the head, after which the group is a fact."""
        state = self.state
        names = list(written)
        head, rest = names[0], names[1:]
        rows_end = {name: state.rows_end[name] + counts.get(name, 0) for name in names}
        intent = {name: {"fragments": [fragment.to_json() for fragment in written[name]], "rows_end": rows_end[name]} for name in names}
        stamp = Stamp(
            kind="group",
            epoch=state.epoch,
            attempt=state.attempt,
            group=state.group + 1,
            lsn_start=state.lsn_end + 1,
            lsn_end=lsn,
            rows_end=rows_end[head],
            marks=state.marks | marks,
            intent=intent,
        )
        self.tables[head].commit(written[head], stamp)
        if self._known_payloads is not None:
            held = [batch for batch in rows.get("payloads", []) if isinstance(batch, pa.RecordBatch)]
            self._known_payloads.update(name for batch in held for name in batch["payload_digest"].to_pylist())
        state.group, state.lsn_end, state.marks = stamp.group, lsn, dict(stamp.marks or {})
        state.rows_end[head] = rows_end[head]
        self.pending = Pending(stamp=stamp, rest={name: (written[name], rows_end[name]) for name in rest})
        self._sync(self.tables[head], [])

    def adopt_rows(self, rows: dict[str, Iterator[pa.Table]], counts: dict[str, int], lsn_end: int) -> None:
        """Take rows that have their lsn already, all at once, into an empty log."""
        assert self.state.lsn_end == -1, "only an empty log adopts rows"
        written = {name: self.tables[name].write(rows[name], max_bytes=self.store.upkeep.target_bytes) for name in TABLES if name in rows}
        for name, fragments in written.items():
            self._sync(self.tables[name], fragments)
        if written:
            self._decide(written, counts, {}, {}, lsn_end)
            self.roll_forward()

    def forget_payloads(self) -> None:
        """Look anew which payloads the log holds: some were emptied."""
        self._known_payloads = None

    def _held_payloads(self) -> set[str]:
        """Names of the payloads that the log holds; one that was emptied comes in again when it is shown again."""
        facts = self.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind = '{KIND}'")
        gone = tombstones_of(facts).emptied("payloads")
        rows = self.tables["payloads"].dataset.to_table(columns=["lsn", "payload_digest"])
        return {name for lsn, name in zip(rows["lsn"].to_pylist(), rows["payload_digest"].to_pylist(), strict=True) if lsn not in gone}

    def _fresh_payloads(self, batches: list[Rows]) -> list[pa.RecordBatch]:
        """The payloads that the log does not hold yet, each once."""
        if self._known_payloads is None:
            self._known_payloads = self._held_payloads()
        fresh, new = [], set[str]()
        for batch in batches:
            assert isinstance(batch, pa.RecordBatch), "payloads come as rows"
            keep = []
            for name in batch["payload_digest"].to_pylist():
                keep.append(name not in self._known_payloads and name not in new)
                new.add(name)
            if any(keep):
                fresh.append(batch.filter(pa.array(keep)))
        return fresh

    def close(self) -> None:
        """Give the lease back."""
        self.lease.release()


def open_core(run_dir: str | Path, store: Store, *, run: str, attempt: int, steal: bool = False) -> LogCore:
    """The core of the log of a run, made when there is none."""
    return LogCore(home_of(run_dir, store), store, run=run, attempt=attempt, steal=steal)


@contextlib.contextmanager
def existing_core(run_dir: str | Path, *, healed: Sequence[Healing] | None = None) -> Iterator[LogCore]:
    """The core of a log that exists and that no writer holds, under its own profile and attempt. A repair passes what it healed."""
    home = find_home(run_dir)
    descriptor = None if home is None else read_descriptor(home)
    if home is None or descriptor is None:
        raise LogError(f"run={run_dir}: no log there; give the folder of a run")
    store = Store(**descriptor.store)
    core = LogCore(home_of(run_dir, store), store, run=descriptor.run, attempt=None, healed=healed)
    try:
        yield core
    finally:
        core.close()
