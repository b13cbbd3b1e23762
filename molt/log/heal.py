"""A table whose newest manifest is torn: set the manifest aside, take the version before, and make the lost commit again.

_versions/N.manifest   empty, cut short or unreadable ---> quarantine/<table>/N.manifest
_transactions/N-1-*.txn  Lance wrote the same commit there before the manifest; its stamp carries every fragment of the group
data files             were written and synced before either
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import lance

from molt.errors import CorruptLogError
from molt.log.checked import calm
from molt.log.home import Home
from molt.log.stamp import CHECK, KEY, Stamp, stamp_of

_LAST = 2**64 - 1
QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """What was done to one table."""

    table: str
    quarantined: tuple[str, ...]
    """Manifests that were set aside, newest first, by their new names."""
    version: int
    """Newest version that opens."""
    redo: tuple[Stamp, ...] = field(default=())
    """Stamps of the lost commits that could be read from their transaction files, oldest first."""


def manifests(home: Home, table: str) -> list[int]:
    """Versions whose manifest exists, newest first."""
    names = home.names(f"{table}.lance/_versions/")
    found = [re.fullmatch(r".*/(\d+)\.manifest", name) for name in names]
    return sorted((_LAST - int(match[1]) for match in found if match), reverse=True)


def manifest_name(table: str, version: int) -> str:
    """Name of the manifest of a version, inside the log."""
    return f"{table}.lance/_versions/{_LAST - version}.manifest"


def is_torn(content: bytes) -> bool:
    """True when a manifest is cut short: a whole one ends in its format version and the letters LANC."""
    return len(content) < 16 or content[-4:] != b"LANC"


def open_version(home: Home, table: str, version: int) -> lance.LanceDataset:
    """A version of a table, read with caches of its own: what failed to open once is not remembered."""
    with calm():
        return lance.LanceDataset(home.table(table), version=version, storage_options=home.storage_options, session=lance.Session())


def check_version(home: Home, table: str, version: int) -> None:
    """Open a version and read its stamp."""
    stamp_of(open_version(home, table, version), version)


def heal_table(home: Home, table: str, *, may_set_aside: Callable[[bytes], bool] = is_torn) -> Healing | None:
    """Set aside newest manifests that do not open; None when the newest opens. CorruptLogError when one may not be set aside."""
    set_aside: list[str] = []
    redo: list[Stamp] = []
    for version in manifests(home, table):
        try:
            check_version(home, table, version)
        except (ValueError, OSError, CorruptLogError) as error:
            name = manifest_name(table, version)
            content = home.read(name) or b""
            if not may_set_aside(content):
                raise CorruptLogError(
                    f"log={home.where}: table {table}: the manifest of version {version} is whole "
                    f"but does not open ({error}); run molt fsck"
                ) from error
            kept = f"{QUARANTINE}/{table}/{version}.manifest"
            home.write(kept, content)
            home.delete(name)
            set_aside.append(kept)
            stamp = stamp_of_attempt(home, table, version)
            redo += [] if stamp is None else [stamp]
            continue
        if not set_aside:
            return None
        return Healing(table=table, quarantined=tuple(set_aside), version=version, redo=tuple(reversed(redo)))
    raise CorruptLogError(f"log={home.where}: table {table}: no version opens; restore the log from a copy")


def stamp_of_attempt(home: Home, table: str, version: int) -> Stamp | None:
    """The stamp of the commit that made (or tried to make) that version, from its transaction file; None when none is whole."""
    for name in home.names(f"{table}.lance/_transactions/{version - 1}-"):
        stamp = _stamp_in(home.read(name) or b"")
        if stamp is not None:
            return stamp
    return None


def _stamp_in(content: bytes) -> Stamp | None:
    text = content.decode("utf-8", errors="replace")
    start = text.find('{"kind":')
    check = re.search(re.escape(CHECK) + r"[^0-9a-f]{1,3}([0-9a-f]{32})", text)
    if start < 0 or check is None:
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
        return Stamp.from_properties({KEY: text[start:end], CHECK: check[1]})
    except (json.JSONDecodeError, CorruptLogError, TypeError):
        return None
