"""One table of the log as Lance keeps it: creation, fragments, and a commit that only the next version lets through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
from lance.dataset import LanceOperation, Transaction
from lance.fragment import DataFile, FragmentMetadata, write_fragments

from molt.errors import FencedError, LogError, LogFullError
from molt.log.checked import calm
from molt.log.crash import crashpoint
from molt.log.encode import FORMAT, WrittenRows, write_file
from molt.log.home import Home, sync_directory, sync_files
from molt.log.stamp import Stamp
from molt.log.store import CodecSettings
from molt.schema import arrow_schema

_FULL_TEXT = ("os error 28", "os error 122", "os error 30", "os error 13", "os error 1)", "No space left", "Permission denied", "Read-only")
_IDS = {"token_ids"}


class Fence:
    """Lets exactly the next version through; a writer that was replaced meets a higher one and stops."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.met: int | None = None

    @contextlib.contextmanager
    def __call__(self, version: int) -> Iterator[None]:
        """Entered by Lance before it makes the manifest of that version."""
        crashpoint("writer.in_commit_lock")
        if version != self.expected:
            self.met = version
            raise FencedError(f"version {version} is next, this writer expected {self.expected}")
        yield


def lance_schema(table: str, codec: CodecSettings) -> pa.Schema:
    """Arrow schema of a table with the codec of each family of columns; payload bytes as Lance blob."""
    fields = []
    for field in arrow_schema(table):
        if table == "payloads" and field.name == "data":
            fields.append(lance.blob_field("data", nullable=False))
            continue
        fields.append(_with_codec(field, codec))
    return pa.schema(fields)


def _with_codec(field: pa.Field, codec: CodecSettings) -> pa.Field:
    if field.name in _IDS:
        choice = codec.ids
    elif pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
        choice = codec.floats
    elif pa.types.is_string(field.type):
        choice = codec.text
    else:
        return field
    if choice == "none":
        return field
    if pa.types.is_list(field.type):
        item = field.type.value_field.with_metadata({"lance-encoding:compression": choice})
        return pa.field(field.name, pa.list_(item), field.nullable)
    return field.with_metadata({"lance-encoding:compression": choice})


def storable(table: str, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows as the Lance schema wants them. A column that was added later stands last in the table, wherever it is declared."""
    rows = rows.select(schema.names)
    if table == "payloads":
        place = rows.schema.get_field_index("data")
        blobs = pa.chunked_array([_as_blobs(chunk, schema.field("data").type) for chunk in rows["data"].chunks], schema.field("data").type)
        rows = rows.set_column(place, schema.field("data"), blobs)
    return pa.Table.from_arrays(rows.columns, schema=schema)


def _as_blobs(data: pa.Array, kind: pa.ExtensionType) -> pa.ExtensionArray:
    """Inline blobs around the bytes as they lie, without a copy."""
    storage = kind.storage_type
    children = [data.cast(pa.large_binary()), *(pa.nulls(len(data), storage[place].type) for place in range(1, storage.num_fields))]
    return pa.ExtensionArray.from_storage(kind, pa.StructArray.from_arrays(children, fields=list(storage)))


class LogTable:
    """The writer's hold on one table."""

    def __init__(self, home: Home, name: str, codec: CodecSettings) -> None:
        self.home = home
        self.name = name
        self.schema = lance_schema(name, codec)
        self.uri = home.table(name)
        self._dataset: lance.LanceDataset | None = None
        self.num_fragments = 0
        """Live fragments."""

    @property
    def dataset(self) -> lance.LanceDataset:
        """The version that the next commit builds on."""
        assert self._dataset is not None, f"table {self.name} is not open"
        return self._dataset

    def open(self) -> bool:
        """Open the newest version; False when the table does not exist."""
        try:
            with calm():
                self._dataset = lance.LanceDataset(self.uri, storage_options=self.home.storage_options, session=self.home.session)
        except ValueError as error:
            if "was not found" in str(error):
                return False
            raise
        self.num_fragments = len(self.dataset.get_fragments())
        return True

    def reopen(self) -> None:
        """Open the same version with the caches of the home's session of now."""
        version, self._dataset = self.dataset.version, None
        if not self.open() or self.dataset.version != version:
            raise FencedError(f"log={self.home.where}: table {self.name} is not at version {version}; another writer took the run")

    def create(self, stamp: Stamp) -> None:
        """Make the empty table."""
        self._dataset = lance.write_dataset(
            self.schema.empty_table(),
            self.uri,
            mode="create",
            data_storage_version=FORMAT,
            enable_stable_row_ids=True,
            transaction_properties=stamp.to_properties(),
            commit_lock=Fence(1),
            storage_options=self.home.storage_options,
            session=self.home.session,
        )
        self.home.keep(self._dataset)
        self.sync([])

    def add_columns(self, columns: list[pa.Field]) -> None:
        """Add columns that are null in every row so far."""
        fence = Fence(self.dataset.version + 1)
        dataset = lance.LanceDataset(self.uri, storage_options=self.home.storage_options, session=self.home.session, commit_lock=fence)
        dataset.add_columns([self.schema.field(column.name) for column in columns])
        self.open()

    def write(self, rows: pa.Table | Iterator[pa.Table], *, max_bytes: int) -> list[FragmentMetadata]:
        """Data files with the rows; visible to nobody before the commit."""
        source: pa.Table | pa.RecordBatchReader
        if isinstance(rows, pa.Table):
            source = storable(self.name, rows, self.schema)
        else:
            batches = (batch for part in rows for batch in storable(self.name, part, self.schema).to_batches())
            source = pa.RecordBatchReader.from_batches(self.schema, batches)
        try:
            return list(write_fragments(source, self.dataset, data_storage_version=FORMAT, max_bytes_per_file=max_bytes))
        except OSError as error:
            raise self._in_words(error) from error

    def adopt_file(self, rows: WrittenRows, lsn_start: int) -> FragmentMetadata:
        """A fragment of a file that a producer wrote and of the lsn of its rows, in a file beside it."""
        lsn = pa.table(
            {"lsn": pa.array(range(lsn_start, lsn_start + rows.num_rows), pa.int64())}, schema=pa.schema([self.schema.field("lsn")])
        )
        name = write_file(self.home, self.name, lsn)
        try:
            files = [DataFile.create(self.dataset, file) for file in (rows.file, name)]
        except (OSError, ValueError) as error:
            raise LogError(f"log={self.home.where}: table {self.name}: the producer's file {rows.file} cannot be read; {error}") from error
        return FragmentMetadata(id=0, files=files, physical_rows=rows.num_rows)

    def commit(self, fragments: list[FragmentMetadata], stamp: Stamp) -> None:
        """Append the fragments as exactly the next version. An unclear outcome is resolved by reading back."""
        self.commit_operation(LanceOperation.Append(fragments), stamp)
        self.num_fragments += len(fragments)

    def commit_operation(self, operation: LanceOperation.BaseOperation, stamp: Stamp) -> None:
        """Make an operation exactly the next version."""
        fence = Fence(self.dataset.version + 1)
        transaction = Transaction(self.dataset.version, operation, transaction_properties=stamp.to_properties())
        try:
            self._dataset = lance.LanceDataset.commit(
                self.dataset, transaction, commit_lock=fence, max_retries=0, storage_options=self.home.storage_options
            )
        except Exception as error:
            self._resolve(error, fence, transaction)

    def _resolve(self, error: Exception, fence: Fence, transaction: Transaction) -> None:
        """Read back what the failed commit did: done, not done, or another writer's."""
        newest = lance.LanceDataset(self.uri, storage_options=self.home.storage_options, session=self.home.session)
        if newest.version >= fence.expected:
            found = newest.read_transaction(fence.expected)
            if found is not None and found.uuid == transaction.uuid:
                self._dataset = newest
                return
            raise FencedError(
                f"log={self.home.where}: table {self.name} is at version {newest.version}, this writer expected to make "
                f"{fence.expected}; another writer took the run, stop this one"
            ) from error
        raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> LogError:
        text = str(error)
        if isinstance(error, LogError):
            return error
        kind = LogFullError if any(part in text for part in _FULL_TEXT) else LogError
        reason = text.split(", /home/")[0]
        return kind(f"log={self.home.where}: table {self.name}: {reason}; nothing half-written is visible, mend it and resume")

    def sync(self, fragments: list[FragmentMetadata]) -> None:
        """Make data files (when fragments are given), or else the newest manifest, durable together with their directories."""
        root = self.home.local_path(self.name)
        if root is None:
            return
        if fragments:
            sync_files(self._files(root, fragments))
            sync_directory(root / "data")
            deletions = [root / item.deletion_file.path(item.id) for item in fragments if item.deletion_file is not None]
            if deletions:
                sync_files(deletions)
                sync_directory(root / "_deletions")
        else:
            sync_files([manifest_path(root, self.dataset.version)])
            sync_directory(root / "_versions")
            if self.dataset.version == 1:
                sync_directory(root)
                sync_directory(root.parent)

    @staticmethod
    def _files(root: Path, fragments: list[FragmentMetadata]) -> Iterator[Path]:
        for fragment in fragments:
            for file in fragment.files:
                path = root / "data" / file.path
                yield path
                blobs = path.with_suffix("")
                if blobs.is_dir():
                    yield from blobs.iterdir()
                    sync_directory(blobs)


def manifest_path(root: Path, version: int) -> Path:
    """File of the manifest of one version: Lance counts names down, so that the newest is listed first."""
    return root / "_versions" / f"{2**64 - 1 - version}.manifest"
