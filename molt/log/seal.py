"""Sealing: a log compacted, and its files and rows written down in SEAL.json so that any later difference shows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from molt import __version__
from molt.log.checked import decode, encode
from molt.log.core import LogCore
from molt.log.crash import crashpoint
from molt.log.reader import LogReader
from molt.log.upkeep import Upkeep, sweep
from molt.log.verify import root_at

NAME = "SEAL.json"
_LEFTOVER_S = 3600.0
"""Age from which a data file that no version names belongs to a group that never happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What SEAL.json says."""

    run: str
    lsn_end: int
    """Rows up to this lsn are sealed."""
    root: str
    """Merkle root over row digests in lsn order, hex."""
    versions: dict[str, int]
    num_rows: dict[str, int]
    files: dict[str, dict[str, Any]]
    """sha256, size in bytes and lsn range of each file, by its path inside the log."""
    made_by: str
    made_at: float
    """Seconds since 1970, UTC."""


def seal_log(core: LogCore, *, is_compacting: bool = True) -> Seal:
    """Compact, clean up, and write SEAL.json. Rows may be appended afterwards; they are past the seal until the next one."""
    upkeep = Upkeep(core)
    sweep(core, older_than_s=_LEFTOVER_S)
    for table in core.tables.values():
        if is_compacting:
            upkeep.compact(table, is_full=True)
            upkeep.clean_up(table, keep=1)
    reader = LogReader.of(core.home)
    cut = reader.cut()
    files: dict[str, dict[str, Any]] = {}
    for name in core.tables:
        lsns = _data_files(cut.dataset(name))
        for path in core.home.sizes(name):
            stem = path.removeprefix("data/").split("/")[0].removesuffix(".lance")
            files[f"{name}.lance/{path}"] = lsns.get(stem, {})
    stable = {
        path: {"sha256": digest, **known}
        for path, known in sorted(files.items())
        if not _changes(path) and (digest := core.home.file_digest(path)) is not None
    }
    seal = Seal(
        run=core.run,
        lsn_end=cut.lsn,
        root=root_at(cut),
        versions=cut.versions,
        num_rows={name: cut.dataset(name).count_rows() for name in core.tables},
        files=stable,
        made_by=f"molt {__version__}",
        made_at=time.time(),
    )
    crashpoint("seal.before_write")
    core.home.write(NAME, encode(seal))
    crashpoint("seal.after_write")
    return seal


def _changes(path: str) -> bool:
    """Whether a file may change under its name although the log does not: Lance's hint, and the tags of pins, which come and go."""
    return path.endswith("latest_version_hint.json") or "/_refs/" in path


def _data_files(dataset: Any) -> dict[str, dict[str, Any]]:
    """lsn range of each data file and its blobs, by the stem of its name."""
    found = {}
    for fragment in dataset.get_fragments():
        lsns = dataset.scanner(columns=["lsn"], fragments=[fragment]).to_table()["lsn"].to_pylist()
        for file in fragment.metadata.files:
            found[file.path.removesuffix(".lance")] = {"lsn_first": min(lsns), "lsn_last": max(lsns)} if lsns else {}
    return found


def read_seal(home: Any) -> Seal | None:
    """The seal of a log; None when it was never sealed."""
    content = home.read(NAME)
    return None if content is None else Seal(**decode(content, NAME))
