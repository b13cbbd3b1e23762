"""Data files written where the rows are made, so that one writer only commits: for when encoding in the writer is the limit.

producer's process: rows -> digests -> data file without lsn, synced ----name of the file----> writer: lsn file beside it -> commit
a file that no commit ever names is swept when the log is sealed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
from lance.file import LanceFileWriter

from molt.errors import LogError
from molt.log.descriptor import read_descriptor
from molt.log.home import FULL, Home, LocalHome, find_home, full_error, sync_directory, sync_files
from molt.log.store import Store

FORMAT = "2.2"
"""Lance file format of every data file."""
ENCODABLE = ("segments", "scores")
"""Tables whose rows are worth it; blobs go through the writer, which stores each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """Rows that lie in a data file already, all columns but lsn."""

    file: str
    """Name inside the data folder of the table."""
    num_rows: int
    digests: tuple[bytes, ...]
    """Of the rows, in order."""

    def __len__(self) -> int:
        return self.num_rows


def write_file(home: Home, table: str, rows: pa.Table) -> str:
    """Write a data file of a table and return its name; visible to nobody before a commit names it."""
    name = f"{uuid4().hex}.lance"
    try:
        with LanceFileWriter(f"{home.table(table)}/data/{name}", rows.schema, version=FORMAT, storage_options=home.storage_options) as file:
            file.write_batch(rows)
    except OSError as error:
        raise LogError(f"log={home.where}: table {table}: a data file cannot be written; {error}") from error
    return name


class Encoder:
    """Writes the data files of one log from any process that reaches its store."""

    def __init__(self, home: Home, store: Store) -> None:
        from molt.log.table import lance_schema

        if store.place == "memory":
            raise LogError("log.store=memory: only its own process reaches it; encode in the writer")
        self._home = home
        self._store = store
        self._schemas = {name: lance_schema(name, store.codec) for name in ENCODABLE}

    @classmethod
    def open(cls, run_dir: str | Path) -> Encoder:
        """The encoder of a log that a writer has made."""
        home = find_home(run_dir)
        descriptor = None if home is None else read_descriptor(home)
        if home is None or descriptor is None:
            raise LogError(f"run={run_dir}: no log there yet; open the writer first")
        return cls(home, Store(**descriptor.store))

    def write(self, table: str, rows: pa.RecordBatch) -> WrittenRows:
        """Write rows to a data file, durable as the profile promises."""
        schema = pa.schema([field for field in self._schemas[table] if field.name != "lsn"])
        stored = pa.Table.from_arrays([rows[field.name] for field in schema], schema=schema)
        name = write_file(self._home, table, stored)
        if self._store.is_synced and isinstance(self._home, LocalHome):
            folder = self._home.root / f"{table}.lance" / "data"
            try:
                sync_files([folder / name])
                sync_directory(folder)
            except OSError as error:
                raise (full_error(error, self._home.where) if error.errno in FULL else error) from error
        return WrittenRows(file=name, num_rows=rows.num_rows, digests=tuple(rows["digest"].to_pylist()))
