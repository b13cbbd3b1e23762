"""Where the files of one log lie: a directory, the memory of this process, or an object store."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import lance

from molt.errors import LogError, LogFullError
from molt.log.store import Store

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of the system that mean: no space, quota or permission."""


class Home(Protocol):
    """Small files beside the tables, and the addresses of the tables."""

    where: str
    """Address for people."""
    storage_options: dict[str, str] | None
    session: Any

    def table(self, name: str) -> str:
        """Address of a table for Lance."""

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None when there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file as a whole; it is durable when this returns."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a small file unless it exists; False when it does. Exactly one of two callers gets True."""

    def delete(self, name: str) -> None:
        """Remove a small file if it is there."""

    def names(self, prefix: str) -> list[str]:
        """Names of the small files that begin with the prefix, sorted."""

    def sizes(self, table: str) -> dict[str, int]:
        """Size in bytes of each file of a table, by its path inside the table."""

    def local_path(self, table: str) -> Path | None:
        """Directory of a table where it is one."""

    def file_digest(self, name: str) -> str | None:
        """sha256 of a file of the log, hex; None when there is none."""

    def renew_session(self) -> None:
        """Begin with empty caches, where the data does not live in them."""

    def keep(self, dataset: Any) -> None:
        """Told of each new table: a home that lives as long as its data sets holds on to it."""


def full_error(error: OSError, where: str) -> LogFullError:
    """The error in words, with the way out."""
    return LogFullError(
        f"log={where}: {error.strerror or error}; nothing half-written is visible, free space or mend the rights and resume"
    )


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Make the content of files durable."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
        finally:
            os.close(handle)


def new_session(size_bytes: int) -> lance.Session:
    """Caches of Lance, bounded."""
    return lance.Session(index_cache_size_bytes=size_bytes // 4, metadata_cache_size_bytes=size_bytes)


class LocalHome:
    """A directory on a file system."""

    def __init__(self, root: Path, *, is_synced: bool, session_bytes: int) -> None:
        self.root = root
        self.where = str(root)
        self.is_synced = is_synced
        self._session_bytes = session_bytes
        self.storage_options: dict[str, str] | None = None
        self.session = new_session(session_bytes)

    def table(self, name: str) -> str:
        """Address of a table for Lance."""
        return str(self.root / f"{name}.lance")

    def local_path(self, table: str) -> Path | None:
        """Directory of a table."""
        return self.root / f"{table}.lance"

    def file_digest(self, name: str) -> str | None:
        """sha256 of a file of the log, hex; None when there is none."""
        try:
            with (self.root / name).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    def renew_session(self) -> None:
        """Begin with empty caches."""
        self.session = new_session(self._session_bytes)

    def keep(self, dataset: Any) -> None:
        """Nothing to do: the files stay."""

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None when there is none."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file by an atomic rename."""
        path = self.root / name
        temporary = self._temporary(path, content)
        try:
            os.replace(temporary, path)
            if self.is_synced:
                sync_directory(path.parent)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise (full_error(error, self.where) if error.errno in FULL else error) from error

    def create(self, name: str, content: bytes) -> bool:
        """Make a small file by a hard link, which fails when the name is taken."""
        path = self.root / name
        temporary = self._temporary(path, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        if self.is_synced:
            sync_directory(path.parent)
        return True

    def _temporary(self, path: Path, content: bytes) -> str:
        temporary: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                if self.is_synced:
                    os.fsync(stream.fileno())
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise (full_error(error, self.where) if error.errno in FULL else error) from error
        return temporary

    def delete(self, name: str) -> None:
        """Remove a small file if it is there."""
        (self.root / name).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        """Names of the small files that begin with the prefix, sorted."""
        parent = (self.root / prefix).parent if not prefix.endswith("/") else self.root / prefix
        if not parent.is_dir():
            return []
        found = [str(path.relative_to(self.root)) for path in parent.iterdir() if path.is_file() and not path.name.startswith(".")]
        return sorted(name for name in found if name.startswith(prefix))

    def sizes(self, table: str) -> dict[str, int]:
        """Size in bytes of each file of a table, by its path inside the table."""
        root = self.root / f"{table}.lance"
        found: dict[str, int] = {}
        for path in root.rglob("*"):
            try:
                if path.is_file():
                    found[str(path.relative_to(root))] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found


class MemoryHome:
    """The memory of this process: one per run, shared by its writer and readers."""

    def __init__(self, name: str, *, session_bytes: int) -> None:
        self.where = f"memory://{name}"
        self._name = name
        self.files: dict[str, bytes] = {}
        self._kept: list[Any] = []
        self.storage_options: dict[str, str] | None = None
        self.session = new_session(session_bytes)

    def table(self, name: str) -> str:
        """Address of a table for Lance."""
        return f"memory://molt{self._name.replace('/', '_')}/{name}.lance"

    def local_path(self, table: str) -> Path | None:
        """None: there is no directory."""
        return None

    def file_digest(self, name: str) -> str | None:
        """sha256 of a small file, hex; the files of tables cannot be reached in memory."""
        content = self.files.get(name)
        return None if content is None else hashlib.sha256(content).hexdigest()

    def renew_session(self) -> None:
        """Nothing: the rows live with the session."""

    def keep(self, dataset: Any) -> None:
        """Hold on to it: the memory is freed with the last data set."""
        self._kept.append(dataset)

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None when there is none."""
        return self.files.get(name)

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        self.files[name] = content

    def create(self, name: str, content: bytes) -> bool:
        """Make a small file unless it exists."""
        return self.files.setdefault(name, content) is content

    def delete(self, name: str) -> None:
        """Remove a small file if it is there."""
        self.files.pop(name, None)

    def names(self, prefix: str) -> list[str]:
        """Names of the small files that begin with the prefix, sorted."""
        return sorted(name for name in self.files if name.startswith(prefix))

    def sizes(self, table: str) -> dict[str, int]:
        """Sizes of the data files that the newest version names; an in-memory store cannot be listed."""
        dataset = lance.LanceDataset(self.table(table), session=self.session)
        return {
            f"data/{file.path}": int(file.file_size_bytes or 0) for fragment in dataset.get_fragments() for file in fragment.metadata.files
        }


_memory: dict[str, MemoryHome] = {}


def forget_memory(run_dir: str | Path) -> None:
    """Drop a log that lives in the memory of this process."""
    _memory.pop(str(run_dir), None)


def home_of(run_dir: str | Path, store: Store) -> Home:
    """The home of the log of a run under a profile."""
    name = str(run_dir)
    if store.place == "s3":
        from molt.log.s3 import S3Home

        return S3Home(name, session_bytes=store.upkeep.session_bytes)
    if store.place == "memory":
        return _memory.setdefault(name, MemoryHome(name, session_bytes=store.upkeep.session_bytes))
    return LocalHome(Path(name).resolve() / "log", is_synced=store.is_synced, session_bytes=store.upkeep.session_bytes)


def find_home(run_dir: str | Path, *, session_bytes: int = 64 << 20) -> Home | None:
    """The home of a log that exists, for readers; None when there is none."""
    name = str(run_dir)
    if name in _memory:
        return _memory[name]
    if name.startswith("s3://"):
        from molt.log.s3 import S3Home

        home: Home = S3Home(name, session_bytes=session_bytes)
    else:
        home = LocalHome(Path(name).resolve() / "log", is_synced=True, session_bytes=session_bytes)
    return home if home.read("LOG.json") is not None else None


def home_at(run_dir: str | Path) -> Home:
    """The home of a log whose LOG.json may be damaged or gone; LogError when there is no log at all."""
    found = find_home(run_dir)
    name = str(run_dir)
    if found is None and not name.startswith("s3://"):
        root = Path(name).resolve() / "log"
        if root.is_dir():
            return LocalHome(root, is_synced=True, session_bytes=64 << 20)
    if found is None:
        raise LogError(f"run={run_dir}: no log there; give the folder of a run")
    return found


def remove_log(run_dir: str | Path) -> None:
    """Delete the log of a run for good."""
    forget_memory(run_dir)
    path = Path(str(run_dir)) / "log"
    if path.is_dir():
        shutil.rmtree(path)
