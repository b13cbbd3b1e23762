"""A consistent view of the log: versions of all tables and one lsn up to which every group is complete.

read the newest stamps, then open the newest versions      the stamps name the newest group g; groups before g are complete
g complete in what was opened?   yes: cut at its last lsn   no: cut before its first lsn, so that no effect lacks its cause
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lance
import pyarrow as pa
import pyarrow.compute as pc

from molt.errors import CorruptLogError, LogError
from molt.log.batch import NEEDED, SegmentBatch, batch_of, from_rows, one_batch, refuse_emptied, verify_rows
from molt.log.blobs import read_blobs
from molt.log.checked import damage_named, is_gone, reason_of
from molt.log.holds import hold
from molt.log.home import Home
from molt.log.portions import reading
from molt.log.rows import Payload
from molt.log.stamp import Stamp, newest_stamp
from molt.log.upcast import upcast, with_missing
from molt.schema import TABLES, arrow_schema, tables

if TYPE_CHECKING:
    import duckdb

    from molt.log.reader import SegmentIndex

T = TypeVar("T")


def cut_point(stamps: Mapping[str, Stamp], reached: Mapping[str, int]) -> int:
    """Largest lsn of the newest complete group. stamps: newest of each table; reached: group that each opened version holds."""
    newest = max(stamps.values(), key=lambda stamp: (stamp.group, stamp.marks is not None, stamp.intent is not None))
    owed = [name for name in newest.intent or {} if reached[name] < newest.group]
    is_headless = newest.marks is None and newest.kind == "group"
    return newest.lsn_start - 1 if owed or is_headless else newest.lsn_end


class Cut:
    """Rows of all tables up to `lsn`; it keeps showing the same rows whatever is appended or compacted."""

    def __init__(
        self,
        home: Home,
        datasets: Mapping[str, lance.LanceDataset],
        lsn: int,
        newest_lsn: Mapping[str, int],
        index: SegmentIndex,
        reopen: Callable[[str], tuple[lance.LanceDataset, int]] | None = None,
        *,
        written: int,
    ) -> None:
        self._written = written
        """Format that the rows were written in."""
        self._home = home
        self._reopen = reopen
        """Newest version of a table and its last lsn: the same rows, for when clean-up took the files of this one. None for a pin."""
        self.lsn = lsn
        """Largest lsn in the cut; -1 when it is empty."""
        self._datasets = dict(datasets)
        self._newest_lsn = dict(newest_lsn)
        self._index = index

    @property
    def versions(self) -> dict[str, int]:
        """Version of each table."""
        return {name: dataset.version for name, dataset in self._datasets.items()}

    def hold(self) -> None:
        """Keep the versions from clean-up while this object lives. Needed only by whoever reads the data sets itself, such as DuckDB."""
        hold(self._home, self.versions, self)

    def dataset(self, name: str) -> lance.LanceDataset:
        """The Lance data set of a table; rows past `lsn` are to be filtered out."""
        return self._datasets[name]

    def _bounded(self, name: str, where: str | None) -> str | None:
        """The filter with the bound of the cut where the version may hold more."""
        bound = f"lsn <= {self.lsn}" if self._newest_lsn[name] > self.lsn else None
        parts = [f"({part})" for part in (where, bound) if part]
        return " and ".join(parts) or None

    def table(self, name: str, columns: Sequence[str] | None = None, where: str | None = None) -> pa.Table:
        """Rows of a table in lsn order; `where` is an SQL expression that Lance pushes down."""
        if name not in TABLES:
            raise LogError(f"table={name!r} is not a table of the log; choose one of {', '.join(TABLES)}")
        dataset = self._datasets[name]
        wanted = [column for column in arrow_schema(name).names if column != "data"] if columns is None else list(columns)
        present = [column for column in wanted if column in dataset.schema.names or column not in arrow_schema(name).names]
        read = present if "lsn" in present else [*present, "lsn"]
        options: dict[str, Any] = {"blob_handling": "all_binary"} if "data" in wanted else {}
        rows = self._retried(name, lambda: self._datasets[name].to_table(columns=read, filter=self._bounded(name, where), **options))
        order = rows["lsn"].combine_chunks() if rows["lsn"].num_chunks != 1 else rows["lsn"].chunk(0)
        if len(rows) > 1 and not pc.all(pc.less(order[:-1], order[1:])).as_py():
            rows = rows.sort_by("lsn")
        return upcast(name, with_missing(name, rows, wanted), written=self._written)

    def segments(self, segment_ids: Sequence[str], verify: bool = True, columns: Sequence[str] | None = None) -> SegmentBatch:
        """Those segments in the order asked, each checked against its digest. LogError names a segment that is not in the cut.

        `columns` reads less; a digest covers the whole row, so it needs verify=False and is not for what feeds a gradient.
        """

        def read() -> SegmentBatch:
            dataset = self._datasets["segments"]
            row_ids = self._index.addresses(dataset, segment_ids, lsn_end=self.lsn)
            return batch_of(dataset, row_ids, segment_ids, verify=verify, columns=columns)

        return self._retried("segments", read)

    def batches(self, columns: Sequence[str] | None = None, *, where: str | None = None, verify: bool = True) -> Iterator[SegmentBatch]:
        """All segments, a bounded number at a time, in the order in which they are stored."""
        dataset = self._datasets["segments"]
        wanted = None if columns is None else list({*columns, *NEEDED})
        with damage_named(f"log={self._home.where}: table segments"):
            scanner = dataset.scanner(columns=wanted, filter=self._bounded("segments", where), **reading(dataset, "segments"))
            for batch in scanner.to_batches():
                rows = one_batch(pa.Table.from_batches([batch]))
                refuse_emptied(rows)
                if verify:
                    verify_rows(rows, f"{dataset.uri}: version {dataset.version}")
                yield from_rows(rows)

    def payload(self, payload_digest: str) -> Payload:
        """A payload by its name, its content checked against it."""
        return self.payloads([payload_digest])[0]

    def payloads(self, payload_digests: Sequence[str]) -> list[Payload]:
        """Payloads by their names in the order asked, each content checked against its name."""
        names = ", ".join(f"'{_hex(name)}'" for name in payload_digests)
        where = f"payload_digest in ({names})"

        def read() -> dict[str, Payload]:
            dataset = self._datasets["payloads"]
            columns = ["payload_digest", "kind", "shape", "dtype", "size_bytes"]
            rows = dataset.scanner(columns=columns, filter=self._bounded("payloads", where), with_row_id=True).to_table()
            found: dict[str, Payload] = {}
            emptied: set[str] = set()
            for row, data in zip(rows.to_pylist(), read_blobs(dataset, rows["_rowid"].to_pylist()), strict=True):
                if row["size_bytes"] and not data:
                    emptied.add(row["payload_digest"])
                    continue
                found[row["payload_digest"]] = Payload(kind=row["kind"], data=data, shape=tuple(row["shape"]), dtype=row["dtype"])
            if gone := sorted(emptied - found.keys()):
                raise LogError(f"payload_digest={gone[0]}: its content was taken out of the log (rows_emptied)")
            return found

        held = self._retried("payloads", read) if payload_digests else {}
        for name in payload_digests:
            if name not in held:
                raise LogError(f"payload_digest={name}: no such payload in the log up to lsn {self.lsn}")
            if held[name].payload_digest != name:
                raise CorruptLogError(f"log={self._home.where}: payload {name} does not hold what its name says; run molt verify")
        return [held[name] for name in payload_digests]

    def payload_range(self, payload_digest: str, offset: int, length: int) -> bytes:
        """Bytes of a payload without reading the rest. A part cannot be checked: for what feeds a gradient take payload()."""
        dataset = self._datasets["payloads"]
        rows = dataset.scanner(columns=["lsn"], filter=f"payload_digest = '{_hex(payload_digest)}'", with_row_id=True).to_table()
        if not len(rows):
            raise LogError(f"payload_digest={payload_digest}: no such payload in the log up to lsn {self.lsn}")
        newest = rows.sort_by("lsn")["_rowid"][-1].as_py()  # an older one was emptied
        ((_, _, data),) = dataset.read_blob_ranges("data", [(newest, offset, length)], selector="ids")
        return bytes(data)

    def _retried(self, name: str, read: Callable[[], T]) -> T:
        """Read; once more from the newest version when a file is gone: clean-up dropped this version, its rows live on."""
        where = f"log={self._home.where}: table {name}"
        try:
            with damage_named(where):
                return read()
        except (OSError, ValueError) as error:
            if isinstance(error, CorruptLogError) or not is_gone(error):
                raise
            if self._reopen is None:
                raise CorruptLogError(f"{where}: a file of a pinned version is gone; {reason_of(error)}; run molt verify") from error
            self._datasets[name], self._newest_lsn[name] = self._reopen(name)
        with damage_named(where, may_be_gone=False):
            return read()

    def connect(self) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection that knows the five tables as of this cut. Filters and projections are pushed down to Lance.

        What does not fit memory goes to a folder of its own: two connections write files of the same names.
        """
        import duckdb

        spills_to = Path(tempfile.gettempdir()) / f"molt-duckdb-{secrets.token_hex(8)}"
        connection = duckdb.connect(config={"temp_directory": str(spills_to)})
        hold(self._home, self.versions, connection)
        for name, dataset in self._datasets.items():
            connection.register(f"log_{name}", dataset)
            bound = f" where lsn <= {self.lsn}" if self._newest_lsn[name] > self.lsn else ""
            added = "".join(
                f', null::{column.sql_type} as "{column.name}"'
                for column in tables()[name].columns
                if column.name not in dataset.schema.names
            )
            connection.execute(f'create temp view "{name}" as select *{added} from "log_{name}"{bound}')
        return connection


def _hex(name: str) -> str:
    """The name of a payload, which is hex and nothing else."""
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        raise LogError(f"payload_digest={name!r}: 32 hex digits are needed")
    return name


def newest_stamps(datasets: Mapping[str, lance.LanceDataset]) -> dict[str, Stamp]:
    """Newest stamp of each table."""
    return {name: newest_stamp(dataset) for name, dataset in datasets.items()}
