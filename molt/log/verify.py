"""Whether a log holds what was written: every file readable, every row under its digest, every lsn there once, its seal true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from molt.errors import CorruptLogError, LogError, MoltError
from molt.log.batch import one_batch
from molt.log.checked import decode, is_panic, reason_of
from molt.log.cut import Cut
from molt.log.digest import merkle_root, row_digests
from molt.log.heal import check_version, manifest_name, manifests
from molt.log.home import Home, home_at
from molt.log.portions import reading
from molt.log.reader import LogReader
from molt.log.tombstone import KIND, LOST, Tombstones, runs_of, tombstones_of
from molt.schema import TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    table: str
    file: str
    """Path inside the log; empty when it concerns no single file."""
    lsn_first: int | None
    lsn_last: int | None
    what: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What verification saw."""

    lsn_end: int
    num_rows: dict[str, int] = field(default_factory=dict)
    num_files: int = 0
    num_emptied: int = 0
    num_lost: int = 0
    """Rows that a repair declared lost."""
    root: str = ""
    """Merkle root over row digests in lsn order, hex; empty unless every row could be read."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True when nothing is wrong."""
        return not self.findings


@dataclass(slots=True, kw_only=True)
class TableScan:
    """Digests of a table by lsn: as written, and of what rows under a tombstone hold now."""

    written: dict[int, bytes] = field(default_factory=dict)
    left: dict[int, bytes] = field(default_factory=dict)
    doubled: list[int] = field(default_factory=list)
    """lsn that came more than once."""
    runs: set[str] = field(default_factory=set)
    """That the rows say they are of."""

    @property
    def emptied(self) -> set[int]:
        """Rows that hold less than was written; a row that had nothing to empty is not among them."""
        return {lsn for lsn, digest in self.left.items() if digest != self.written[lsn]}


def fragment_rows(dataset: lance.LanceDataset, fragment: lance.LanceFragment, table: str) -> Iterator[pa.RecordBatch]:
    """Every row of a fragment with all its content, a bounded number at a time."""
    for batch in dataset.scanner(fragments=[fragment], **reading(dataset, table, [fragment])).to_batches():
        yield one_batch(pa.Table.from_batches([batch]))


def _scan_rows(rows: pa.RecordBatch, emptied: set[int], scan: TableScan) -> list[int]:
    """Note the digests of a batch; the lsn of rows that do not hold what their digest says."""
    wrong = []
    scan.runs.update(pc.unique(rows["run"]).to_pylist())
    lsns = np.asarray(rows["lsn"]).tolist()
    for lsn, kept, made in zip(lsns, rows["digest"].to_pylist(), row_digests(rows), strict=True):
        if lsn in scan.written:
            scan.doubled.append(lsn)
        scan.written[lsn] = kept
        if lsn in emptied:
            scan.left[lsn] = made
        elif kept != made:
            wrong.append(lsn)
    return wrong


def _scan_table(dataset: lance.LanceDataset, table: str, tombstones: Tombstones, report: Report, damaged: Set[str]) -> TableScan:
    """Read every row of a table but those in files that are known to be damaged: a wrong length in one can ask for any amount of memory."""
    scan, emptied = TableScan(), tombstones.emptied(table)
    for fragment in dataset.get_fragments():
        report.num_files += len(fragment.metadata.files)
        file = f"{table}.lance/data/{fragment.metadata.files[0].path}"
        if file in damaged:
            continue
        before = len(scan.written)
        try:
            for rows in fragment_rows(dataset, fragment, table):
                report.findings += [
                    Finding(table=table, file=file, lsn_first=first, lsn_last=last, what="rows fail their digest")
                    for first, last in runs_of(_scan_rows(rows, emptied, scan))
                ]
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            read = len(scan.written) - before
            what = f"cannot be read past {read} of {fragment.metadata.physical_rows} rows: {type(error).__name__}: {reason_of(error)}"
            report.findings.append(Finding(table=table, file=file, lsn_first=None, lsn_last=None, what=what))
    return scan


def _check_emptied(table: str, scan: TableScan, tombstones: Tombstones) -> list[Finding]:
    """Emptied rows still hold what their tombstone says is left. Of rows that a repair lost there is nothing to compare the rest with."""
    findings, emptied = [], scan.emptied
    for item in tombstones.items:
        if item.table != table or not item.lsns & emptied or item.lsns & tombstones.lost:
            continue
        present = sorted(lsn for lsn in item.lsns if lsn in scan.left)
        if merkle_root([scan.left[lsn] for lsn in present]).hex() != item.left_root:
            findings.append(
                Finding(table=table, file="", lsn_first=present[0], lsn_last=present[-1], what="emptied rows differ from their tombstone")
            )
    return findings


def check_density(digests: Mapping[int, bytes], lsn_end: int, lost: Set[int] = frozenset()) -> list[Finding]:
    """Every lsn from 0 on is a row, or was declared lost by a repair."""
    missing = [lsn for lsn in range(lsn_end + 1) if lsn not in digests and lsn not in lost]
    return [Finding(table="", file="", lsn_first=first, lsn_last=last, what="rows are missing") for first, last in runs_of(missing)]


def verify_cut(cut: Cut, damaged: Set[str] = frozenset(), *, run: str | None = None) -> Report:
    """Read every row of a cut and check it; files that are known to be damaged are left out. run: that every row must be of."""
    cut.hold()
    report = Report(lsn_end=cut.lsn)
    try:
        tombstones = tombstones_of(cut.dataset("events").to_table(columns=["kind", "body"], filter=f"kind in ('{KIND}', '{LOST}')"))
    except BaseException as error:
        if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
            raise
        tombstones = Tombstones()
    digests: dict[int, bytes] = {}
    for table in TABLES:
        scan = _scan_table(cut.dataset(table), table, tombstones, report, damaged)
        report.findings += _check_emptied(table, scan, tombstones)
        found = {lsn: digest for lsn, digest in scan.written.items() if lsn <= cut.lsn}
        report.num_rows[table] = len(found)
        report.num_emptied += len(scan.emptied)
        if run is not None and (others := sorted(scan.runs - {run})):
            what = f"rows of run {', '.join(others)}, LOG.json says {run}"
            report.findings.append(Finding(table=table, file="LOG.json", lsn_first=None, lsn_last=None, what=what))
        doubled = sorted({*scan.doubled, *(set(found) & set(digests))})
        if doubled:
            report.findings.append(Finding(table=table, file="", lsn_first=doubled[0], lsn_last=doubled[-1], what="an lsn is used twice"))
        digests |= found
    report.num_lost = len(tombstones.lost - set(digests))
    report.findings += [] if damaged else check_density(digests, cut.lsn, tombstones.lost)
    if len(digests) + report.num_lost == cut.lsn + 1:
        report.root = merkle_root([digests[lsn] for lsn in sorted(digests)]).hex()
    return report


def root_at(cut: Cut) -> str:
    """Merkle root over the stored digests of a cut, hex, without reading contents."""
    digests: dict[int, bytes] = {}
    for table in TABLES:
        rows = cut.table(table, ["lsn", "digest"])
        digests.update(zip(rows["lsn"].to_pylist(), rows["digest"].to_pylist(), strict=True))
    return merkle_root([digests[lsn] for lsn in sorted(digests)]).hex()


def _seal(home: Home) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The fields of SEAL.json, or what is wrong with it."""
    content = home.read("SEAL.json")
    if content is None:
        return None, []
    try:
        return decode(content, "SEAL.json"), []
    except CorruptLogError as error:
        return None, [Finding(table="", file="SEAL.json", lsn_first=None, lsn_last=None, what=str(error))]


def check_files(home: Home) -> list[Finding]:
    """Sealed files that still exist and hold something else."""
    seal, findings = _seal(home)
    for name, known in (seal or {"files": {}})["files"].items():
        found = home.file_digest(name)
        if found is not None and found != known["sha256"]:
            lsns = known.get("lsn_first"), known.get("lsn_last")
            findings.append(
                Finding(table=name.split(".lance")[0], file=name, lsn_first=lsns[0], lsn_last=lsns[1], what="differs from the sealed file")
            )
    return findings


def check_root(reader: LogReader) -> list[Finding]:
    """Whether the sealed rows still make the sealed root."""
    seal, _ = _seal(reader.home)
    if seal is None:
        return []
    lsn_end, root = int(seal["lsn_end"]), str(seal["root"])
    if seal["run"] != reader.run:
        return [
            Finding(table="", file="SEAL.json", lsn_first=None, lsn_last=None, what=f"seals run {seal['run']}, LOG.json says {reader.run}")
        ]
    try:
        made = root_at(reader.cut(at=lsn_end))
    except (MoltError, OSError, ValueError, RuntimeError) as error:
        return [Finding(table="", file="", lsn_first=0, lsn_last=lsn_end, what=f"the sealed rows cannot be read: {error}")]
    if made == root:
        return []
    return [Finding(table="", file="SEAL.json", lsn_first=0, lsn_last=lsn_end, what=f"root {made} is not the sealed {root}")]


def check_manifests(home: Home) -> list[Finding]:
    """Newest manifests that do not open, or whose stamp cannot be trusted."""
    findings = []
    for table in TABLES:
        for version in manifests(home, table)[:1]:
            try:
                check_version(home, table, version)
            except BaseException as error:
                if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
                    raise
                name = manifest_name(table, version)
                findings.append(Finding(table=table, file=name, lsn_first=None, lsn_last=None, what=f"does not open: {reason_of(error)}"))
    return findings


def verify_log(run_dir: str | Path) -> Report:
    """Read the whole log and check it and its seal."""
    try:
        home = home_at(run_dir)
        findings = check_files(home)
        reader = LogReader.open(run_dir)
        report = verify_cut(reader.cut(), frozenset(finding.file for finding in findings), run=reader.run)
        report.findings += findings or check_root(reader)
        return report
    except (CorruptLogError, LogError) as error:
        home = home_at(run_dir)
        unopened = Finding(table="", file=_named_file(str(error)), lsn_first=None, lsn_last=None, what=f"cannot be opened: {error}")
        return Report(lsn_end=-1, findings=[unopened, *check_files(home), *check_manifests(home)])


def _named_file(text: str) -> str:
    return "LOG.json" if "LOG.json" in text else ""
