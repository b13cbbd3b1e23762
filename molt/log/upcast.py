"""Old logs in new code: what a table of an older format lacks is filled in, and each format is turned into the next by one function.

A column that was added later is null in older rows; that needs no new format. A format is raised when rows change their meaning: then
UPCASTS[N] is a function upcast_N(table, rows) that turns rows of format N into format N + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lance
import pyarrow as pa

from molt import __version__
from molt.errors import LogError
from molt.log import descriptor
from molt.log.descriptor import Descriptor
from molt.schema import arrow_schema

UPCASTS: dict[int, Callable[[str, pa.Table], pa.Table]] = {}
"""By format: the function that leads to the next one."""


def upcast(table: str, rows: pa.Table, *, written: int) -> pa.Table:
    """Rows of an older format as the current one."""
    for number in range(written, descriptor.FORMAT):
        if number not in UPCASTS:
            raise LogError(f"format {number}: this molt {__version__} has no function that reads it; take an older molt to export the log")
        rows = UPCASTS[number](table, rows)
    return rows


def unknown_columns(table: str, dataset: lance.LanceDataset) -> list[str]:
    """Columns that the log has and this code does not know."""
    return sorted(set(dataset.schema.names) - set(arrow_schema(table).names))


def missing_columns(table: str, dataset: lance.LanceDataset) -> list[pa.Field]:
    """Columns that this code knows and the log does not have."""
    return [column for column in arrow_schema(table) if column.name not in dataset.schema.names]


def refuse_newer(table: str, dataset: lance.LanceDataset, found: Descriptor | None) -> None:
    """LogError when the table has columns that this code would drop without a word."""
    unknown = unknown_columns(table, dataset)
    if unknown:
        writer = "a newer molt" if found is None else found.written_by or found.made_by
        raise LogError(
            f"log={dataset.uri}: column {unknown[0]!r} was written by {writer} and is unknown to molt {__version__}; "
            f"take that version or a newer one"
        )


def with_missing(table: str, rows: pa.Table, wanted: Sequence[str]) -> pa.Table:
    """The wanted columns in order, null where the log is older than the column."""
    schema = arrow_schema(table)
    return pa.table({name: rows[name] if name in rows.schema.names else pa.nulls(len(rows), schema.field(name).type) for name in wanted})
