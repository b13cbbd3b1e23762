"""Reading the log while it is written: a tail per table, and cuts over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from molt.errors import CorruptLogError, LogError
from molt.log.checked import damage_named, is_gone
from molt.log.crash import crashpoint
from molt.log.cut import Cut, cut_point, newest_stamps
from molt.log.descriptor import Descriptor, read_descriptor
from molt.log.home import Home, find_home
from molt.log.stamp import newest_stamp
from molt.log.tombstone import LOST, tombstones_of
from molt.log.upcast import refuse_newer
from molt.schema import TABLES

T = TypeVar("T")
_TRIES = 20
"""Reads in a row that may lose the race with clean-up."""


_MESSAGE = ("attempt", "producer", "seq")
"""What names a message: its rows have one of each, and lie side by side in the order of the log."""


def last_whole(cut: Cut, at: int) -> int:
    """The largest lsn up to `at` behind which no message of the cut goes on."""

    def rows(where: str) -> list[dict[str, Any]]:
        return [row for table in TABLES for row in cut.table(table, ["lsn", *_MESSAGE], where=where).to_pylist()]

    messages = {row["lsn"]: tuple(row[name] for name in _MESSAGE) for row in rows(f"lsn >= {at} and lsn <= {at + 1}")}
    if len(messages) < 2 or len(set(messages.values())) > 1:
        return at
    attempt, producer, seq = messages[at]
    quoted = producer.replace("'", "''")
    return min(int(row["lsn"]) for row in rows(f"attempt = {attempt} and producer = '{quoted}' and seq = {seq}")) - 1


class LogReader:
    """Opens the tables of one log. Reads take no lock and disturb no writer."""

    def __init__(self, home: Home, descriptor: Descriptor) -> None:
        self.home = home
        self.descriptor = descriptor
        self.run = descriptor.run
        self._datasets: dict[str, lance.LanceDataset] = {}
        self._index = SegmentIndex()

    @classmethod
    def open(cls, run_dir: str | Path) -> LogReader:
        """The reader of a run; LogError when there is no log, or one newer than this code."""
        home = find_home(run_dir)
        descriptor = None if home is None else read_descriptor(home)
        if home is None or descriptor is None:
            raise LogError(f"run={run_dir}: no log there; give the folder of a run")
        return cls(home, descriptor)

    @classmethod
    def of(cls, home: Home) -> LogReader:
        """A reader beside a writer that holds the home."""
        descriptor = read_descriptor(home)
        assert descriptor is not None, f"{home.where} has no descriptor"
        return cls(home, descriptor)

    def newest(self, table: str) -> lance.LanceDataset:
        """The newest version of a table."""
        held = self._datasets.get(table)
        try:
            with damage_named(f"log={self.home.where}: table {table}"):
                if held is None or held.latest_version != held.version:
                    held = lance.LanceDataset(self.home.table(table), storage_options=self.home.storage_options, session=self.home.session)
        except ValueError as error:
            if "was not found" in str(error):
                raise LogError(f"log={self.home.where}: table {table} does not exist yet; is the writer still starting?") from error
            raise
        assert held is not None, "it was opened"
        if table not in self._datasets:
            with damage_named(f"log={self.home.where}: table {table}"):
                refuse_newer(table, held, self.descriptor)
        self._datasets[table] = held
        return held

    def must_reach(self, lsn: int, what: str) -> None:
        """LogError when the log ends before the lsn that `what` builds on: it was lost, or an older copy of it lies there."""
        end = self.cut().lsn
        if end < lsn:
            raise LogError(
                f"log={self.home.where}: it ends at lsn {end}, but {what} builds on lsn {lsn}: rows are missing; "
                f"restore the log of this run from a copy, or begin a new run"
            )

    def cut(self, at: int | str | None = None) -> Cut:
        """A consistent view: everything up to the newest complete group, or what the pin of that name holds, or up to lsn `at`; where
        that lies inside a message, up to the end of the message before, as half of one is no state that the log was ever in."""
        if isinstance(at, str):
            from molt.log.pin import pinned_cut

            return pinned_cut(self, at)
        return self._again(lambda: self._cut(at))

    def _cut(self, at: int | None) -> Cut:
        stamps = newest_stamps({name: self.newest(name) for name in reversed(TABLES)})
        datasets = {name: self.newest(name) for name in reversed(TABLES)}
        opened = newest_stamps(datasets)
        lsn = cut_point(stamps, {name: stamp.group for name, stamp in opened.items()})
        if at is not None and at > lsn:
            raise LogError(f"at={at}: the log reaches only to lsn {lsn}; give a smaller one")
        newest_lsn = {name: stamp.lsn_end for name, stamp in opened.items()}
        newest = {name: datasets[name] for name in TABLES}

        def up_to(lsn: int) -> Cut:
            return Cut(self.home, newest, lsn, newest_lsn, self._index, self._reopened, written=self.descriptor.format)

        return up_to(lsn if at is None else last_whole(up_to(lsn), at))

    def _again(self, read: Callable[[], T]) -> T:
        """Read; once more from newer versions when clean-up took those that were just opened."""
        for _ in range(_TRIES - 1):
            try:
                return read()
            except (OSError, ValueError) as error:
                if not is_gone(error) or isinstance(error, CorruptLogError):
                    raise
                self._datasets.clear()
        with damage_named(f"log={self.home.where}", may_be_gone=False):
            return read()

    def _reopened(self, table: str) -> tuple[lance.LanceDataset, int]:
        """Newest version of a table and its last lsn."""
        dataset = self.newest(table)
        return dataset, newest_stamp(dataset).lsn_end

    def cut_of(self, versions: Mapping[str, int], lsn: int) -> Cut:
        """The cut of given versions, bounded by lsn: what a pin names."""
        datasets = {
            name: lance.LanceDataset(
                self.home.table(name), version=versions[name], storage_options=self.home.storage_options, session=self.home.session
            )
            for name in TABLES
        }
        return Cut(self.home, datasets, lsn, dict.fromkeys(TABLES, lsn + 1), SegmentIndex(), written=self.descriptor.format)

    def tail(self, table: str, columns: Sequence[str] | None = None, after: int = -1) -> Tail:
        """A cursor over the rows of a table past lsn `after`."""
        return Tail(self, table, columns, after)


class Tail:
    """Rows as they arrive, each once, in lsn order, whatever is compacted meanwhile. Keep `after` to go on later."""

    def __init__(self, reader: LogReader, table: str, columns: Sequence[str] | None, after: int) -> None:
        self.after = after
        """Largest lsn that was given out."""
        self._reader = reader
        self._table = table
        self._columns = None if columns is None else list(columns)
        self._seen_fragment = -1
        self._seen_version = 0
        self._seen_rows: int | None = None
        """Rows of the table that were ever appended up to the last poll."""

    def poll(self) -> pa.Table:
        """Rows that came since the last poll; an empty table when none did."""
        rows = self._reader._again(self._poll)
        crashpoint("reader.after_poll")
        return rows

    def _poll(self) -> pa.Table:
        dataset = self._reader.newest(self._table)
        names = [name for name in (dataset.schema.names if self._columns is None else self._columns) if name != "data"]
        if dataset.version == self._seen_version:
            return pa.schema([dataset.schema.field(name) for name in names]).empty_table()
        seen_rows = self._seen_rows
        if seen_rows is None:
            seen_rows = dataset.count_rows(filter=f"lsn <= {self.after}") if self.after >= 0 else 0
        fresh = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id > self._seen_fragment]
        read = names if "lsn" in names else [*names, "lsn"]
        with damage_named(f"log={self._reader.home.where}: table {self._table}"):
            rows = dataset.scanner(columns=read, filter=f"lsn > {self.after}", fragments=fresh).to_table().sort_by("lsn")
        rows_end = newest_stamp(dataset).rows_end
        self._check_count(rows, rows_end - seen_rows)
        if len(rows):
            self.after = rows["lsn"][-1].as_py()
        self._seen_rows = rows_end
        self._seen_fragment = max((fragment.fragment_id for fragment in fresh), default=self._seen_fragment)
        self._seen_version = dataset.version
        return rows.select(names)

    def _check_count(self, rows: pa.Table, expected: int) -> None:
        """As many rows came as were appended, each under an lsn of its own: one less is lost, one more is doubled."""
        lsn = np.asarray(rows["lsn"])
        if len(rows) == expected and (np.diff(lsn) > 0).all():
            return
        events = self._reader.newest("events").to_table(columns=["kind", "body"], filter=f"kind = '{LOST}'")
        lost = tombstones_of(events).lost
        if lost and len(rows) < expected <= len(rows) + len(lost) and (np.diff(lsn) > 0).all():
            return
        raise CorruptLogError(
            f"log={self._reader.home.where}: table {self._table}: {len(rows)} rows after lsn {self.after}, "
            f"{expected} were appended; run molt verify"
        )


class SegmentIndex:
    """Row id and lsn of each segment, kept up to date from the fragments that are new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._lsn_end = -1
        self._seen_fragment = -1

    def addresses(self, dataset: lance.LanceDataset, segment_ids: Sequence[str], *, lsn_end: int) -> list[int]:
        """Stable row ids of the segments."""
        with self._lock:
            if any(name not in self._places for name in segment_ids):
                self._extend(dataset)
            missing = [name for name in segment_ids if self._places.get(name, (0, lsn_end + 1))[1] > lsn_end]
            if missing:
                raise LogError(
                    f"segment_id={missing[0]}: not in the log up to lsn {lsn_end} ({len(missing)} of {len(segment_ids)} missing)"
                )
            return [self._places[name][0] for name in segment_ids]

    def _extend(self, dataset: lance.LanceDataset) -> None:
        fresh = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id > self._seen_fragment]
        if not fresh:
            return
        rows = dataset.scanner(columns=["segment_id", "lsn"], filter=f"lsn > {self._lsn_end}", fragments=fresh, with_row_id=True).to_table()
        places = zip(rows["_rowid"].to_pylist(), rows["lsn"].to_pylist(), strict=True)
        self._places.update(zip(rows["segment_id"].to_pylist(), places, strict=True))
        self._lsn_end = max(self._lsn_end, pc.max(rows["lsn"]).as_py() or -1)
        self._seen_fragment = max(fragment.fragment_id for fragment in fresh)
