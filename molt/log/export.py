"""The log as Parquet with page checksums and back: sorted by lsn, documented, checked by file digest and Merkle root."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from molt import __version__
from molt.errors import CorruptLogError, DataError, SettingError
from molt.log.core import LogCore
from molt.log.cut import Cut
from molt.log.digest import merkle_root, row_digests
from molt.log.home import find_home, home_of, remove_log
from molt.log.pin import pinned_cut
from molt.log.portions import MOST_ROWS, PORTION_BYTES, WEIGHT, reading
from molt.log.reader import LogReader
from molt.log.store import load_store
from molt.log.tombstone import KIND, LOST, Tombstones, tombstones_of
from molt.log.upcast import with_missing
from molt.log.upkeep import runs_within
from molt.log.verify import root_at
from molt.schema import TABLES, arrow_schema, reference

MANIFEST = "MANIFEST.json"
ROW_GROUP_BYTES = 64 << 20
"""Bound on a row group in memory, so that any reader gets it in one piece."""
_BATCH_ROWS = 64
"""Rows of an exported file at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What MANIFEST.json says."""

    run: str
    lsn_end: int
    root: str
    """Merkle root over row digests in lsn order, hex."""
    tables: dict[str, dict[str, Any]]
    """By table: file, rows, size in bytes, sha256."""
    made_by: str
    made_at: float
    """Seconds since 1970, UTC."""


def sorted_batches(cut: Cut, table: str) -> Iterator[pa.Table]:
    """Rows of a table up to the cut in lsn order, a bounded number at a time."""
    dataset = cut.dataset(table)
    order = dataset.to_table(columns=["lsn"])["lsn"].combine_chunks()
    is_sorted = len(order) < 2 or bool(pc.all(pc.less(order[:-1], order[1:])).as_py())
    options, schema = reading(dataset, table), arrow_schema(table)
    for where in [f"lsn <= {cut.lsn}"] if is_sorted else _windows(dataset, table, cut.lsn):
        scanner = dataset.scanner(filter=where, scan_in_order=True, **options)
        parts = (pa.Table.from_batches([batch]) for batch in scanner.to_batches())
        for rows in parts if is_sorted else [scanner.to_table().sort_by("lsn")]:
            if len(rows):
                full = with_missing(table, rows, schema.names)
                yield pa.Table.from_arrays([full[field.name].cast(field.type) for field in schema], schema=schema)


def _windows(dataset: lance.LanceDataset, table: str, lsn_end: int) -> Iterator[str]:
    """Filters that take the rows of a table in parts, each sorted in memory: rows that were rewritten lie behind later ones."""
    column, width = WEIGHT.get(table, ("lsn", 0))
    light = dataset.to_table(columns=list({"lsn", column}), filter=f"lsn <= {lsn_end}").sort_by("lsn")
    lsns = light["lsn"].to_pylist()
    sizes = [max(PORTION_BYTES // MOST_ROWS, width * number) for number in light[column].to_pylist()]
    for part in runs_within(sizes, most=PORTION_BYTES):
        yield f"lsn >= {lsns[part[0]]} and lsn <= {lsns[part[-1]]}"


def _write_table(cut: Cut, table: str, path: Path, row_group_bytes: int) -> int:
    """One Parquet file; the number of its rows."""
    num_rows, held, size = 0, [], 0
    with pq.ParquetWriter(path, arrow_schema(table), compression="zstd", write_page_checksum=True, store_schema=True) as writer:
        for rows in sorted_batches(cut, table):
            for start in range(0, len(rows), 64):
                part = rows.slice(start, 64)
                held.append(part)
                size += part.nbytes
                num_rows += len(part)
                if size >= row_group_bytes:
                    writer.write_table(pa.concat_tables(held))
                    held, size = [], 0
        if held:
            writer.write_table(pa.concat_tables(held))
    return num_rows


def export_log(run_dir: str | Path, to: Path, *, pin: str | None = None, row_group_bytes: int = ROW_GROUP_BYTES) -> Export:
    """Write the log, or what a pin names, into a new folder."""
    if to.exists() and any(to.iterdir()):
        raise SettingError(f"to={to}: the folder is not empty; give a new one")
    to.mkdir(parents=True, exist_ok=True)
    reader = LogReader.open(run_dir)
    cut = reader.cut() if pin is None else pinned_cut(reader, pin)
    cut.hold()
    _refuse_unexplained(cut, pin)
    tables = {}
    for name in TABLES:
        path = to / f"{name}.parquet"
        num_rows = _write_table(cut, name, path, row_group_bytes)
        tables[name] = {"file": path.name, "rows": num_rows, "size_bytes": path.stat().st_size, "sha256": _sha256(path)}
    export = Export(run=reader.run, lsn_end=cut.lsn, root=root_at(cut), tables=tables, made_by=f"molt {__version__}", made_at=time.time())
    (to / "README.md").write_text(f"# Export of run {reader.run}\n\nRows are sorted by lsn.\n\n{reference()}", encoding="utf-8")
    (to / MANIFEST).write_bytes(orjson.dumps(export, option=orjson.OPT_INDENT_2))
    return export


def _refuse_unexplained(cut: Cut, pin: str | None) -> None:
    """SettingError when rows of the cut were emptied or lost under a tombstone that lies past it: without that they would look damaged."""
    facts = cut.dataset("events").to_table(columns=["lsn", "kind", "body"], filter=f"lsn > {cut.lsn} and kind in ('{KIND}', '{LOST}')")
    later = tombstones_of(facts)
    if any(lsn <= cut.lsn for lsns in (later.lost, *(item.lsns for item in later.items)) for lsn in lsns):
        raise SettingError(
            f"pin={pin}: rows up to its lsn {cut.lsn} were emptied or lost, as lsn {pc.min(facts['lsn']).as_py()} and later say; "
            f"pin the log as of there, or as it is now"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_export(source: Path) -> Export:
    """The manifest of an export, its files checked."""
    try:
        export = Export(**orjson.loads((source / MANIFEST).read_bytes()))
    except FileNotFoundError as error:
        raise DataError(f"source={source}: no {MANIFEST}; give a folder that molt export made") from error
    except (orjson.JSONDecodeError, TypeError) as error:
        raise CorruptLogError(f"{source / MANIFEST}: damaged; {error}") from error
    for name, known in export.tables.items():
        path = source / known["file"]
        if not path.is_file() or _sha256(path) != known["sha256"]:
            raise CorruptLogError(f"{path}: missing or not the exported file of table {name}; export again")
    return export


def _refuse_newer(export: Export, files: dict[str, Path]) -> None:
    """DataError when a file has columns that this code would drop without a word."""
    for table, path in files.items():
        if unknown := sorted(set(pq.read_schema(path).names) - set(arrow_schema(table).names)):
            raise DataError(
                f"{path}: column {unknown[0]!r} was written by {export.made_by} and is unknown to molt {__version__}; "
                "take that version or a newer one"
            )


def _checked(path: Path, table: str, digests: dict[int, bytes], emptied: set[int]) -> Iterator[pa.Table]:
    """Rows of an exported file, each under its digest unless it was emptied; null in columns that are newer than the export."""
    names = arrow_schema(table).names
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for lsn, kept, made in zip(batch["lsn"].to_pylist(), batch["digest"].to_pylist(), row_digests(batch), strict=True):
                if kept != made and lsn not in emptied:
                    raise CorruptLogError(f"{path}: row lsn {lsn} fails its digest")
                digests[lsn] = kept
            yield with_missing(table, pa.Table.from_batches([batch]), names)


def import_log(source: Path, run_dir: str | Path, *, store: str = "durable") -> Export:
    """Make a log from an export: same rows, same lsn, same root. The run must not have a log yet; one that fails leaves none on disk."""
    export = read_export(source)
    if find_home(run_dir) is not None or (Path(str(run_dir)) / "log").exists():
        raise SettingError(f"run={run_dir}: has a log already; give a new folder")
    profile = load_store(store)
    files = {name: source / known["file"] for name, known in export.tables.items() if known["rows"]}
    _refuse_newer(export, files)
    attempts = [pc.max(pq.read_table(path, columns=["attempt"])["attempt"]).as_py() for path in files.values()]
    core = LogCore(home_of(run_dir, profile), profile, run=export.run, attempt=max(attempts, default=1))
    if core.state.lsn_end >= 0:  # another import was here between the look and the lease
        core.close()
        raise SettingError(f"run={run_dir}: has a log already; give a new folder")
    try:
        _adopt(core, export, files)
    except BaseException:
        remove_log(run_dir)
        raise
    finally:
        core.close()
    return export


def _adopt(core: LogCore, export: Export, files: dict[str, Path]) -> None:
    """Take the exported rows into a new log, each under its digest, and compare their root."""
    digests: dict[int, bytes] = {}
    facts = pq.read_table(files["events"], columns=["kind", "body"]) if "events" in files else None
    tombstones = Tombstones() if facts is None else tombstones_of(facts)
    rows = {name: _checked(path, name, digests, tombstones.emptied(name)) for name, path in files.items()}
    core.adopt_rows(rows, {name: int(known["rows"]) for name, known in export.tables.items()}, export.lsn_end)
    if merkle_root([digests[lsn] for lsn in sorted(digests)]).hex() != export.root:
        raise CorruptLogError(
            f"{next(iter(files.values())).parent}: the root of the rows there is not the exported one; nothing was imported"
        )
