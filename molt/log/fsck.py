"""Repair: the newest version of each table that opens, rows that can still be read kept, everything else named and set aside.

1  LOG.json damaged                     set aside, made again
2  a manifest that does not open        set aside; the version before it; the lost commit made again where its transaction file is whole
3  a decided group not complete         rolled forward (as every writer does)
4  a data file with unreadable rows     rows under a true digest are kept, the file is copied to quarantine/, the rest is declared lost
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lance
import orjson
import pyarrow as pa
from lance.dataset import LanceOperation

from molt.errors import CorruptLogError
from molt.log.batch import one_batch
from molt.log.checked import is_panic, reason_of
from molt.log.core import LogCore, existing_core
from molt.log.descriptor import NAME as DESCRIPTOR
from molt.log.descriptor import ensure_descriptor, read_descriptor
from molt.log.digest import row_digests
from molt.log.heal import QUARANTINE, Healing, check_version, heal_table, manifest_name, manifests, open_version
from molt.log.home import Home, home_at
from molt.log.rows import event, to_arrow
from molt.log.store import load_store
from molt.log.table import LogTable
from molt.log.tombstone import KIND, LOST, Tombstones, runs_of, tombstones_of
from molt.log.verify import Finding, Report, check_density, fragment_rows, verify_log
from molt.schema import TABLES


@dataclass(slots=True, kw_only=True)
class Repair:
    """What fsck found, and did if it was told to repair."""

    is_repaired: bool
    found: list[Finding] = field(default_factory=list)
    lost: list[Finding] = field(default_factory=list)
    """Rows that are gone, by table and lsn."""
    quarantined: list[str] = field(default_factory=list)
    """Files set aside, by their new names inside the log."""
    after: Report | None = None
    """Verification at the end."""

    @property
    def is_clean(self) -> bool:
        """True when nothing was wrong, or everything wrong was repaired or declared lost."""
        return not self.found if self.after is None else self.after.is_clean


def fsck(run_dir: str | Path, *, is_repairing: bool = False) -> Repair:
    """Examine a log, and mend it if told to. Needs the lease to repair."""
    home = home_at(run_dir)
    repair = Repair(is_repaired=is_repairing)
    _examine_descriptor(home, repair, run=Path(str(run_dir)).name, is_repairing=is_repairing)
    healed: list[Healing] = []
    for table in TABLES:
        healing = _examine_manifests(home, table, repair, is_repairing=is_repairing)
        healed += [] if healing is None else [healing]
    if not is_repairing:
        if not repair.found:
            repair.found = verify_log(run_dir).findings
        return repair
    with existing_core(run_dir, healed=healed) as core:
        for held in core.tables.values():
            _mend_table(core, held, repair)
        _declare_missing(core, repair)
    repair.after = verify_log(run_dir)
    return repair


def _examine_descriptor(home: Home, repair: Repair, *, run: str, is_repairing: bool) -> None:
    try:
        if read_descriptor(home) is not None:
            return
        what = "is missing"
    except CorruptLogError as error:
        what = str(error)
    repair.found.append(Finding(table="", file=DESCRIPTOR, lsn_first=None, lsn_last=None, what=what))
    if is_repairing:
        content = home.read(DESCRIPTOR)
        if content is not None:
            home.write(f"{QUARANTINE}/{DESCRIPTOR}", content)
            home.delete(DESCRIPTOR)
            repair.quarantined.append(f"{QUARANTINE}/{DESCRIPTOR}")
        ensure_descriptor(home, load_store("s3" if home.where.startswith("s3://") else "durable"), _run_of_rows(home) or run)


def _run_of_rows(home: Home) -> str | None:
    """Name of the run as the rows say it."""
    for table in ("events", "segments"):
        for version in manifests(home, table):
            try:
                rows = open_version(home, table, version).to_table(columns=["run"], limit=1)
            except (ValueError, OSError):
                continue
            if len(rows):
                return str(rows["run"][0])
            break
    return None


def _examine_manifests(home: Home, table: str, repair: Repair, *, is_repairing: bool) -> Healing | None:
    for version in manifests(home, table):
        try:
            check_version(home, table, version)
            break
        except BaseException as error:
            if not isinstance(error, ValueError | OSError | RuntimeError) and not is_panic(error):
                raise
            what = f"the manifest of version {version} does not open: {reason_of(error)}"
            repair.found.append(Finding(table=table, file=manifest_name(table, version), lsn_first=None, lsn_last=None, what=what))
    if not is_repairing or not any(finding.table == table for finding in repair.found):
        return None
    healing = heal_table(home, table, may_set_aside=lambda content: True)
    repair.quarantined += [] if healing is None else healing.quarantined
    return healing


def _readable(dataset: lance.LanceDataset, row_ids: list[int], table: str) -> Iterator[pa.RecordBatch]:
    """The rows that can be decoded, found by halving what cannot."""
    try:
        options = {"blob_handling": "all_binary"} if table == "payloads" else {}
        if table == "payloads":
            rows = dataset.to_table(filter=f"_rowid in ({', '.join(map(str, row_ids))})", **options)
        else:
            rows = dataset._take_rows(row_ids)
        yield one_batch(rows)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if len(row_ids) > 1:
            middle = len(row_ids) // 2
            yield from _readable(dataset, row_ids[:middle], table)
            yield from _readable(dataset, row_ids[middle:], table)


def _true_rows(rows: pa.RecordBatch, emptied: set[int]) -> pa.RecordBatch:
    keep = [
        made == kept or lsn in emptied
        for lsn, kept, made in zip(rows["lsn"].to_pylist(), rows["digest"].to_pylist(), row_digests(rows), strict=True)
    ]
    return rows.filter(pa.array(keep, pa.bool_()))


def _is_whole(dataset: lance.LanceDataset, fragment: lance.LanceFragment, table: str, emptied: set[int]) -> bool:
    try:
        count = 0
        for rows in fragment_rows(dataset, fragment, table):
            count += _true_rows(rows, emptied).num_rows
        return count == fragment.count_rows()
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return False


def _mend_table(core: LogCore, table: LogTable, repair: Repair) -> None:
    """Replace each damaged fragment by the rows in it that are true, in one commit: a repair that dies leaves all that could be read."""
    emptied = _tombstones(core).emptied(table.name)
    for fragment in table.dataset.get_fragments():
        if _is_whole(table.dataset, fragment, table.name, emptied):
            continue
        for file in fragment.metadata.files:
            name = f"{table.name}.lance/data/{file.path}"
            content = core.home.read(name)
            if content is not None:
                core.home.write(f"{QUARANTINE}/{name}", content)
                repair.quarantined.append(f"{QUARANTINE}/{name}")
            repair.found.append(Finding(table=table.name, file=name, lsn_first=None, lsn_last=None, what="holds unreadable rows"))
        fresh = lance.LanceDataset(table.uri, storage_options=core.home.storage_options, session=lance.Session())
        row_ids = _row_ids(fresh, fragment.fragment_id)
        saved = [_true_rows(rows, emptied) for rows in _readable(fresh, row_ids, table.name)]
        kept = [rows for rows in saved if rows.num_rows]
        written = table.write(pa.Table.from_batches(kept), max_bytes=core.store.upkeep.target_bytes) if kept else []
        if core.store.is_synced and written:
            table.sync(written)
        swap = LanceOperation.Update(removed_fragment_ids=[fragment.fragment_id], new_fragments=written)
        table.commit_operation(swap, core.state.stamp(table.name, "carry"))
    if core.store.is_synced:
        table.sync([])
    table.open()


def _row_ids(dataset: lance.LanceDataset, fragment_id: int) -> list[int]:
    """Row ids of a fragment, from the manifest alone."""
    fragment = dataset.get_fragment(fragment_id)
    assert fragment is not None, f"fragment {fragment_id} is live"
    return list(dataset.scanner(columns=[], with_row_id=True, fragments=[fragment]).to_table()["_rowid"].to_pylist())


def _tombstones(core: LogCore) -> Tombstones:
    try:
        events = core.tables["events"].dataset.to_table(columns=["kind", "body"], filter=f"kind in ('{KIND}', '{LOST}')")
    except (OSError, ValueError):
        return Tombstones()
    return tombstones_of(events)


def _declare_missing(core: LogCore, repair: Repair) -> None:
    """Say which rows are gone, in the log itself."""
    present: dict[int, bytes] = {}
    for table in core.tables.values():
        present.update(dict.fromkeys(table.dataset.to_table(columns=["lsn"])["lsn"].to_pylist(), b""))
    repair.lost = check_density(present, core.state.lsn_end, _tombstones(core).lost)
    if not repair.lost:
        return
    lsns = [lsn for finding in repair.lost for lsn in range(finding.lsn_first or 0, (finding.lsn_last or 0) + 1)]
    fact = event(
        LOST,
        table_name="",
        lsn_runs=orjson.dumps(runs_of(lsns)).decode(),
        num_rows=len(lsns),
        files=list(repair.quarantined),
        reason="; ".join(sorted({finding.what for finding in repair.found})) or "rows are missing",
    )
    producer = f"log.{core.state.epoch}.fsck"
    rows = to_arrow("events", [fact], run=core.run, attempt=core.state.attempt, producer=producer, seq=0)
    core.commit_group({"events": [rows]}, {})
