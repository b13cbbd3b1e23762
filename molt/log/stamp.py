"""What each commit says about the whole log: epoch, group, place in the order, high-water marks, and what its group still owes.

group 7 over three tables           newest stamp of each table        after a crash here
  write and sync all data files     all at group 6                    group 7 never happened
  commit segments (head)            segments 7 + intent               group 7 is decided: the rest is committed from the intent
  commit events                     events 7                          same
  commit consumption                consumption 7                     complete
  acknowledge
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lance
import orjson

from molt.errors import CorruptLogError
from molt.log.checked import is_gone
from molt.log.digest import bytes_digest

KEY, CHECK = "molt", "molt.check"
"""Names of the transaction properties that hold the stamp and its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The state of the log as of one commit."""

    kind: str
    """group, epoch (a writer took the log) or carry (upkeep went before)."""
    epoch: int
    attempt: int
    group: int
    """Groups are numbered from 1; this table holds every row of groups up to this one."""
    lsn_start: int
    """First lsn of the group."""
    lsn_end: int
    """Last lsn of the group; the next group begins after it."""
    rows_end: int
    """Rows ever appended to this table."""
    marks: dict[str, tuple[int, str]] | None = None
    """High-water mark per producer: seq and digest of its last message. On heads, epochs and carries."""
    intent: dict[str, dict[str, Any]] | None = None
    """On a head: for each table of the group, itself included, its fragments and rows_end."""

    def to_properties(self) -> dict[str, str]:
        """The stamp as transaction properties."""
        text = orjson.dumps(self)
        return {KEY: text.decode(), CHECK: bytes_digest(text).hex()}

    @classmethod
    def from_properties(cls, properties: dict[str, str] | None) -> Stamp | None:
        """The stamp in transaction properties; None when there is none."""
        if not properties or KEY not in properties:
            return None
        if bytes_digest(properties[KEY].encode()).hex() != properties.get(CHECK):
            raise CorruptLogError("the stamp of a commit fails its digest; run molt fsck")
        fields = orjson.loads(properties[KEY])
        if fields.get("marks") is not None:
            fields["marks"] = {name: (seq, digest) for name, (seq, digest) in fields["marks"].items()}
        return cls(**fields)


def newest_stamp(dataset: lance.LanceDataset, *, reach: int = 64) -> Stamp:
    """The stamp of the newest commit that carries one; upkeep commits without a stamp are passed over."""
    version = dataset.version
    for candidate in range(version, max(version - reach, 0), -1):
        stamp = stamp_of(dataset, candidate)
        if stamp is not None:
            return stamp
    raise CorruptLogError(f"{dataset.uri}: no stamp in versions {max(version - reach, 0) + 1}..{version}; run molt fsck")


def stamp_of(dataset: lance.LanceDataset, version: int) -> Stamp | None:
    """The stamp of one version; CorruptLogError when it cannot be trusted."""
    try:
        transaction = dataset.read_transaction(version)
        return Stamp.from_properties(transaction.transaction_properties if transaction else None)
    except (OSError, ValueError, TypeError) as error:
        if is_gone(error):
            raise
        reason = str(error).split(", /home/")[0]
        raise CorruptLogError(f"{dataset.uri}: the manifest of version {version} is damaged: {reason}; run molt fsck") from error


@dataclass(slots=True, kw_only=True)
class LogState:
    """What the writer knows: the newest stamp of the log and the marks."""

    epoch: int = 0
    attempt: int = 0
    group: int = 0
    lsn_end: int = -1
    rows_end: dict[str, int] = field(default_factory=dict)
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def stamp(self, table: str, kind: str, **more: Any) -> Stamp:
        """A stamp of the state as it is, with all marks."""
        return Stamp(
            kind=kind,
            epoch=self.epoch,
            attempt=self.attempt,
            group=self.group,
            lsn_start=self.lsn_end + 1,
            lsn_end=self.lsn_end,
            rows_end=self.rows_end[table],
            marks=dict(self.marks),
            **more,
        )
