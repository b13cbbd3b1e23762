"""The typed views over one cut, and the connection that shows them: it reaches nothing outside the log and cannot be unlocked."""

from __future__ import annotations

from pathlib import Path

import duckdb

from molt.log.pin import pinned_cut
from molt.log.reader import LogReader
from molt.schema import TableSchema, event_kinds

ENVELOPE = ("step", "policy_version", "group_id", "rollout_id", "segment_id")
"""Columns of an event that its kind may also declare; the kind's own wins."""

LOCKS = (
    "set enable_external_access = false",
    "set autoinstall_known_extensions = false",
    "set autoload_known_extensions = false",
    "set allow_community_extensions = false",
    "set python_enable_replacements = false",
    "set lock_configuration = true",
)
"""What closes the connection, the lock last."""

Pin = int | str | None
"""A place in the log: an lsn, the name of a pin, or None for now."""


def open_audit(run_dir: str | Path, at: Pin = None) -> duckdb.DuckDBPyConnection:
    """A locked connection with the five tables and every typed view over one consistent cut of a run's log.

    at: an lsn, the name of a pin, or None for now. LogError for a pin that is not there, or an lsn that is not reached.
    """
    reader = LogReader.open(run_dir)
    place = int(at) if isinstance(at, str) and at.isdigit() else at
    cut = pinned_cut(reader, place) if isinstance(place, str) else reader.cut(at=place)
    connection = cut.connect()
    add_views(connection)
    lock(connection)
    return connection


def add_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Add the views to a connection that shows the five tables."""
    for kind, schema in event_kinds().items():
        connection.execute(event_view(kind, schema))
    connection.execute((Path(__file__).parent / "views.sql").read_text(encoding="utf-8"))


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Close the connection: no files, no network, no extensions, no Python variables, no way back."""
    for statement in LOCKS:
        connection.execute(statement)


def event_view(kind: str, schema: TableSchema) -> str:
    """The view of one kind of event: who wrote it and when, then its columns with their declared types."""
    own = {column.name for column in schema.columns}
    shape = ", ".join(f'"{column.name}": {_json_type(column.sql_type)}' for column in schema.columns)
    envelope = ["lsn", "run", "attempt", "producer", "seq", "happened_at", *(name for name in ENVELOPE if name not in own)]
    columns = ", ".join([*envelope, *(f'body."{column.name}" as "{column.name}"' for column in schema.columns)])
    return (
        f"create view \"{kind}\" as with said as (select * replace (from_json(body, '{{{shape}}}') as body) "
        f"from events where kind = '{kind}') select {columns} from said"
    )


def _json_type(sql_type: str) -> str:
    """A declared type as from_json names it: a list is an array of one type."""
    return f"[{_json_type(sql_type[:-2])}]" if sql_type.endswith("[]") else f'"{sql_type}"'
