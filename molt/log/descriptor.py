"""LOG.json: what a reader must know before it opens a table."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import lance

from molt import __version__
from molt.errors import CorruptLogError, LogError
from molt.log.checked import decode, encode
from molt.log.home import Home
from molt.log.store import Store

NAME = "LOG.json"
FORMAT = 1
"""Raised when an older reader could misread the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """The log as its first writer made it, and how its newest one keeps it."""

    format: int
    run: str
    store: dict[str, Any]
    """Profile of the newest writer: verbs that look after the log take the same lease and sync as it did."""
    made_by: str
    lance: str
    made_at: float
    """Seconds since 1970, UTC."""
    written_by: str = ""
    """The newest release that wrote to it."""


def read_descriptor(home: Home) -> Descriptor | None:
    """The descriptor; None when there is no log; LogError when it is newer than this code."""
    content = home.read(NAME)
    if content is None:
        return None
    try:
        fields = decode(content, f"log={home.where}: {NAME}")
        written = int(fields["format"])
    except (KeyError, TypeError) as error:
        raise CorruptLogError(f"log={home.where}: {NAME} is damaged ({error}); run molt fsck") from error
    if written > FORMAT:
        raise LogError(
            f"log={home.where}: format {written}, written by {fields.get('written_by') or fields.get('made_by')}; "
            f"this molt {__version__} reads up to {FORMAT}: "
            "take a newer molt"
        )
    return Descriptor(**{name: fields[name] for name in Descriptor.__dataclass_fields__ if name in fields})


def ensure_descriptor(home: Home, store: Store, run: str) -> Descriptor:
    """The descriptor, made when the log is new."""
    found = read_descriptor(home)
    if found is None:
        fresh = Descriptor(
            format=FORMAT, run=run, store=store.model_dump(), made_by=f"molt {__version__}", lance=lance.__version__, made_at=time.time()
        )
        home.create(NAME, encode(fresh))
        found = read_descriptor(home)
        assert found is not None, f"{NAME} vanished"
    if found.run != run:
        raise LogError(f"log={home.where}: it belongs to run {found.run!r}, not {run!r}; give the run's own folder")
    if found.format != FORMAT:
        raise LogError(
            f"log={home.where}: format {found.format}; this molt {__version__} writes format {FORMAT} and would mix the two: "
            f"go on with {found.written_by or found.made_by}, or begin a new run"
        )
    newest = replace(found, written_by=f"molt {__version__}", store=store.model_dump())
    if found != newest:
        found = newest
        home.write(NAME, encode(found))
    return found
