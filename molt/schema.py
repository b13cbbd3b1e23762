"""Columns of the log: the DDL in schemas/ read once by DuckDB, as Arrow schemas, row checks and a reference."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb
import pyarrow as pa

from molt.errors import DataError
from molt.places import folder

TABLES = ("payloads", "segments", "scores", "events", "consumption")
"""In commit order: a cause is never committed after its effect."""

FILLED_BY_LOG = ("lsn", "run", "attempt", "producer", "seq", "digest")
"""Columns that producer and writer fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column as declared."""

    name: str
    sql_type: str
    is_nullable: bool
    comment: str
    arrow: pa.Field


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """One table as declared: the caption is the first comment of its file."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    arrow: pa.Schema
    checks: tuple[str, ...]
    has_violations: bool
    """A macro <name>_violations lists the rows that break what check cannot say."""
    ddl: str


def _renamed(kind: pa.DataType) -> pa.DataType:
    """The type with list children named item, as Lance and Parquet name them."""
    if pa.types.is_list(kind):
        return pa.list_(pa.field("item", _renamed(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _renamed(field.type), field.nullable) for field in kind])
    return kind


def _caption(ddl: str) -> str:
    lines = []
    for line in ddl.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)


def _read(path: Path, connection: duckdb.DuckDBPyConnection) -> TableSchema:
    name, ddl = path.stem, path.read_text(encoding="utf-8")
    try:
        connection.execute(ddl)
    except duckdb.Error as error:
        raise DataError(f"{path}: DuckDB cannot read the table; {error}") from error
    arrow = connection.sql(f'select * from "{name}" limit 0').to_arrow_table().schema
    rows = connection.execute(
        "select column_name, data_type, is_nullable, coalesce(comment, '') from duckdb_columns() "
        "where table_name = ? order by column_index",
        [name],
    ).fetchall()
    checks = connection.execute(
        "select constraint_text from duckdb_constraints() where table_name = ? and constraint_type = 'CHECK'", [name]
    ).fetchall()
    has_violations = bool(connection.execute("select 1 from duckdb_functions() where function_name = ?", [f"{name}_violations"]).fetchall())
    columns = tuple(
        Column(
            name=column,
            sql_type=sql_type,
            is_nullable=nullable,
            comment=comment,
            arrow=pa.field(column, _renamed(arrow.field(column).type), nullable),
        )
        for column, sql_type, nullable, comment in rows
    )
    return TableSchema(
        name=name,
        caption=_caption(ddl),
        columns=columns,
        arrow=pa.schema([column.arrow for column in columns]),
        checks=tuple(text for (text,) in checks),
        has_violations=has_violations,
        ddl=ddl,
    )


@cache
def tables() -> dict[str, TableSchema]:
    """The tables of the log, in commit order."""
    with duckdb.connect() as connection:
        return {name: _read(folder("schemas") / f"{name}.sql", connection) for name in TABLES}


@cache
def event_kinds() -> dict[str, TableSchema]:
    """The kinds of events and the columns of their bodies."""
    with duckdb.connect() as connection:
        return {path.stem: _read(path, connection) for path in sorted((folder("schemas") / "events").glob("*.sql"))}


def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table; the type of a blob column is the plain binary type."""
    return tables()[table].arrow


_local = threading.local()


def _checker() -> duckdb.DuckDBPyConnection:
    """One private DuckDB per thread, holding the empty tables."""
    connection: duckdb.DuckDBPyConnection | None = getattr(_local, "connection", None)
    if connection is None:
        connection = duckdb.connect(config={"threads": 1})
        connection.execute("set enable_external_access = false")
        for schema in tables().values():
            connection.execute(schema.ddl)
        _local.connection = connection
    return connection


def validate(table: str, rows: pa.RecordBatch | pa.Table) -> None:
    """Raise DataError, with the rule in words, unless every row obeys the declared checks of its table."""
    schema = tables()[table]
    connection = _checker()
    names = ", ".join(f'"{name}"' for name in rows.schema.names)
    arrived = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    connection.begin()
    try:
        connection.register("arrived", arrived)
        connection.execute(f'insert into "{table}" ({names}) select {names} from arrived')
        if schema.has_violations:
            found = connection.execute(f"select * from {table}_violations('{table}') limit 3").fetchall()
            if found:
                raise DataError(f"{table}: " + "; ".join(f"{row}: {rule}" for row, rule in found))
    except duckdb.Error as error:
        text = str(error).splitlines()[0]
        raise DataError(f"{table}: a row breaks a declared rule; {text}") from error
    finally:
        connection.rollback()
        connection.unregister("arrived")


def reference() -> str:
    """The column reference as Markdown, from the same files."""
    lines: list[str] = []
    for heading, group in (("Tables", tables()), ("Kinds of events", event_kinds())):
        lines += [f"# {heading}", ""]
        for schema in group.values():
            lines += [f"## {schema.name}", "", schema.caption, "", "| column | type | null | meaning |", "|---|---|---|---|"]
            lines += [
                f"| `{column.name}` | `{column.sql_type.lower()}` | {'yes' if column.is_nullable else 'no'} | {column.comment} |"
                for column in schema.columns
            ]
            lines += ["", *(f"- check: `{check}`" for check in schema.checks), ""]
    return "\n".join(lines)
