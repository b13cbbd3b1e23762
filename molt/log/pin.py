"""Pins: a name for one exact state of the log. Its versions stay readable; it is checked by digest, never trusted by name."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from molt import __version__
from molt.errors import CorruptLogError, LogError, SettingError
from molt.log.checked import decode, encode
from molt.log.crash import crashpoint
from molt.log.cut import Cut
from molt.log.holds import PINS
from molt.log.home import Home
from molt.log.reader import LogReader
from molt.log.verify import root_at, verify_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One exact state of the log."""

    name: str
    lsn: int
    root: str
    """Merkle root over row digests up to lsn, hex."""
    versions: dict[str, int]
    next_row: dict[str, int]
    """Rows of each table up to lsn."""
    code_digest: str
    """Of the code that made it; empty when unknown."""
    made_by: str
    made_at: float
    """Seconds since 1970, UTC."""


def create_pin(run_dir: str | Path, name: str, *, at: int | None = None, code_digest: str = "") -> Pin:
    """Pin the log as it is, or as of lsn `at`. SettingError for a taken or impossible name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise SettingError(f"pin={name!r}: a name is made of letters, digits, dot, dash and underscore; choose another")
    reader = LogReader.open(run_dir)
    if reader.home.read(f"{PINS}{name}.json") is not None:
        raise SettingError(f"pin={name}: exists already; choose another name")
    cut = reader.cut(at)
    cut.hold()
    pin = Pin(
        name=name,
        lsn=cut.lsn,
        root=root_at(cut),
        versions=cut.versions,
        next_row={table: cut.table(table, ["lsn"]).num_rows for table in cut.versions},
        code_digest=code_digest,
        made_by=f"molt {__version__}",
        made_at=time.time(),
    )
    if not reader.home.create(f"{PINS}{name}.json", encode(pin)):
        raise SettingError(f"pin={name}: exists already; choose another name")
    for table in cut.versions:
        cut.dataset(table).tags.create(f"molt-{name}", cut.versions[table])
        crashpoint("pin.after_tag")
    return pin


def list_pins(run_dir: str | Path) -> list[Pin]:
    """All pins, by name."""
    home = LogReader.open(run_dir).home
    return [read_pin(home, path.removeprefix(PINS).removesuffix(".json")) for path in home.names(PINS)]


def read_pin(home: Home, name: str) -> Pin:
    """A pin by name."""
    content = home.read(f"{PINS}{name}.json")
    if content is None:
        raise LogError(f"pin={name}: no such pin in {home.where}; see molt pin list")
    try:
        return Pin(**decode(content, f"pins/{name}.json"))
    except TypeError as error:
        raise CorruptLogError(f"pin={name}: pins/{name}.json is damaged; {error}") from error


def delete_pin(run_dir: str | Path, name: str) -> None:
    """Let go of a pin: clean-up may then drop its versions."""
    reader = LogReader.open(run_dir)
    pin = read_pin(reader.home, name)
    for table in pin.versions:
        tags = reader.newest(table).tags
        if f"molt-{name}" in tags.list():
            tags.delete(f"molt-{name}")
    reader.home.delete(f"{PINS}{name}.json")


def pinned_cut(reader: LogReader, name: str) -> Cut:
    """The cut that a pin names, by its versions."""
    pin = read_pin(reader.home, name)
    return reader.cut_of(pin.versions, pin.lsn)


def verify_pin(run_dir: str | Path, name: str, *, is_reading_rows: bool = True) -> list[str]:
    """What differs from the pin: empty when it is true. Reads every pinned row unless told otherwise."""
    reader = LogReader.open(run_dir)
    pin = read_pin(reader.home, name)
    try:
        cut = pinned_cut(reader, name)
        held = {table: reader.newest(table).tags.list().get(f"molt-{name}", {}).get("version") for table in pin.versions}
    except (OSError, ValueError, RuntimeError) as error:
        return [f"pin={name}: its versions {pin.versions} cannot be opened: {error}"]
    wrong = [
        f"pin={name}: its tag on table {table} holds version {held[table]}, pinned was {version}; a clean-up may drop it, pin again"
        for table, version in pin.versions.items()
        if held[table] != version
    ]
    for table, expected in pin.next_row.items():
        found = cut.table(table, ["lsn"]).num_rows
        if found != expected:
            wrong.append(f"pin={name}: table {table} holds {found} rows up to lsn {pin.lsn}, pinned were {expected}")
    if not wrong and root_at(cut) != pin.root:
        wrong.append(f"pin={name}: root {root_at(cut)} is not the pinned {pin.root}")
    if is_reading_rows and not wrong:
        wrong += [f"pin={name}: {finding}" for finding in verify_cut(cut).findings]
    return wrong
