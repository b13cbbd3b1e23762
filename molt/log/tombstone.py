"""What was taken out of the log on purpose: rows that keep scalars and digest, and hold their heavy content no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
import pyarrow as pa

KIND, LOST = "rows_emptied", "rows_lost"
"""Kinds of events: rows emptied on purpose, and rows that a repair could not save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """One event of the kind."""

    table: str
    family: str
    lsns: frozenset[int]
    left_root: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Tombstones:
    """All tombstones up to a cut."""

    items: list[Tombstone] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """lsn of rows that a repair declared lost."""

    def emptied(self, table: str) -> set[int]:
        """lsn of the emptied rows of a table."""
        return {lsn for item in self.items if item.table == table for lsn in item.lsns}


def runs_of(lsns: Iterable[int]) -> list[list[int]]:
    """Numbers as sorted [first, last] runs."""
    runs: list[list[int]] = []
    for lsn in sorted(lsns):
        if runs and runs[-1][1] == lsn - 1:
            runs[-1][1] = lsn
        else:
            runs.append([lsn, lsn])
    return runs


def tombstones_of(events: pa.Table) -> Tombstones:
    """The tombstones among events (columns kind, body)."""
    found = Tombstones()
    for kind, body in zip(events["kind"].to_pylist(), events["body"].to_pylist(), strict=True):
        if kind not in (KIND, LOST):
            continue
        fields = orjson.loads(body)
        lsns = frozenset(lsn for first, last in orjson.loads(fields["lsn_runs"]) for lsn in range(first, last + 1))
        if kind == LOST:
            found.lost |= lsns
            continue
        found.items.append(
            Tombstone(
                table=fields["table_name"], family=fields["family"], lsns=lsns, left_root=fields["left_root"], reason=fields["reason"]
            )
        )
    return found
