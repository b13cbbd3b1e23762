"""Which state of a log an offline tool reads: now, up to an lsn, or as pinned. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from molt.errors import CorruptLogError
from molt.log.cut import Cut
from molt.log.pin import pinned_cut, verify_pin
from molt.log.reader import LogReader

Place = int | str | None
"""An lsn, the name of a pin, or None for now."""


def open_cut(run_dir: Path, at: Place = None) -> Cut:
    """The state of the log at a place, kept from clean-up while it is read. A pin is checked by its root, not trusted by its name."""
    reader = LogReader.open(run_dir)
    if isinstance(at, str):
        cut = pinned_cut(reader, at)
        wrong = verify_pin(run_dir, at, is_reading_rows=False)
        if wrong:
            raise CorruptLogError(wrong[0])
    else:
        cut = reader.cut(at=at)
    cut.hold()
    return cut
