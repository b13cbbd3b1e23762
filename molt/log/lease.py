"""Who may write: one lease per log, so that a second writer is refused at the door and a replaced one is fenced at the commit.

    flock      a lock of this machine on the file LEASE: free as soon as its holder is dead
    process    a name in this process (memory profile)
    expiring   objects lease/<generation> made by conditional put, renewed by the holder, free when its time is over

The lease only keeps the honest apart. What stops a writer that slept through the loss of its lease is the fence in commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import orjson

from molt.errors import FencedError, LeaseHeldError
from molt.log.home import Home, LocalHome
from molt.log.store import Store

NAME = "LEASE"
_GENERATIONS = "lease/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    pid: int
    host: str
    token: str
    since: float
    """Seconds since 1970, UTC."""
    expires_at: float | None = None

    @classmethod
    def me(cls, *, ttl_s: float | None = None) -> Holder:
        """This process."""
        now = time.time()
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            token=os.urandom(8).hex(),
            since=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )

    def encode(self) -> bytes:
        """As JSON."""
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> Holder | None:
        """From JSON; None when it is not whole."""
        try:
            return cls(**orjson.loads(content))
        except (orjson.JSONDecodeError, TypeError):
            return None


class Lease(Protocol):
    """The right to write, while it lasts."""

    def check(self) -> None:
        """Raise FencedError when the lease is lost."""

    def release(self) -> None:
        """Give it back."""


def held_error(home: Home, holder: Holder | None) -> LeaseHeldError:
    """The refusal in words."""
    who = "another writer" if holder is None else f"process {holder.pid} on {holder.host} since {time.ctime(holder.since)}"
    return LeaseHeldError(f"log={home.where}: {who} holds the run; stop it, or wait until it is gone, then open again")


class FlockLease:
    """A lock on the file LEASE."""

    def __init__(self, home: LocalHome, *, steal: bool) -> None:
        self._path: Path = home.root / NAME
        if steal:
            self._path.unlink(missing_ok=True)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = Holder.decode(os.pread(self._handle, 4096, 0))
            os.close(self._handle)
            raise held_error(home, holder) from error
        content = Holder.me().encode()
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, content, 0)

    def check(self) -> None:
        """Raise FencedError when the file was replaced."""
        try:
            same = os.stat(self._path).st_ino == os.fstat(self._handle).st_ino
        except FileNotFoundError:
            same = False
        if not same:
            raise FencedError(f"log={self._path.parent}: the lease was taken by another writer; stop this one")

    def release(self) -> None:
        """Unlock; the file stays."""
        with contextlib.suppress(OSError):
            os.close(self._handle)


_in_process: dict[str, Holder] = {}


class ProcessLease:
    """A name in this process."""

    def __init__(self, home: Home, *, steal: bool) -> None:
        self._key = home.where
        self._me = Holder.me()
        if not steal and _in_process.setdefault(self._key, self._me) is not self._me:
            raise held_error(home, _in_process[self._key])
        _in_process[self._key] = self._me

    def check(self) -> None:
        """Raise FencedError when another took it."""
        if _in_process.get(self._key) is not self._me:
            raise FencedError(f"log={self._key}: the lease was taken by another writer; stop this one")

    def release(self) -> None:
        """Free the name."""
        if _in_process.get(self._key) is self._me:
            del _in_process[self._key]


class ExpiringLease:
    """A row of objects lease/<generation>, each made by exactly one process: the newest is the holder while its time lasts.

    Taking over is the creation of the next generation, so two processes that both see a dead holder cannot both succeed.
    """

    def __init__(self, home: Home, *, ttl_s: float, steal: bool) -> None:
        self._home = home
        self._ttl_s = ttl_s
        self._me = Holder.me(ttl_s=ttl_s)
        newest = self._newest()
        holder = None if newest is None else Holder.decode(home.read(newest) or b"")
        if newest is not None and holder is not None and not steal and (holder.expires_at or 0.0) > time.time():
            raise held_error(home, holder)
        self._name = f"{_GENERATIONS}{0 if newest is None else int(newest.removeprefix(_GENERATIONS)) + 1:012d}"
        if not home.create(self._name, self._me.encode()):
            raise held_error(home, Holder.decode(home.read(self._name) or b""))
        for older in home.names(_GENERATIONS):
            if older < self._name:
                home.delete(older)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="molt-lease", daemon=True)
        self._thread.start()

    def _newest(self) -> str | None:
        return max(self._home.names(_GENERATIONS), default=None)

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_s / 3):
            renewed = replace(self._me, expires_at=time.time() + self._ttl_s)
            try:
                if self._newest() != self._name:
                    return
                self._home.write(self._name, renewed.encode())
            except Exception:  # a full disk, a store that is away: the next turn tries again, and check() counts from the last success
                continue
            self._me = renewed

    def check(self) -> None:
        """Raise FencedError when it may have passed to another: its time is over by this clock. The fence of the commit does the rest."""
        if time.time() > (self._me.expires_at or 0.0):
            raise FencedError(
                f"log={self._home.where}: the lease ran out at {time.ctime(self._me.expires_at)}; another writer may hold the run"
            )

    def release(self) -> None:
        """Stop renewing; what is left of its time is given up."""
        self._stop.set()
        self._thread.join(timeout=self._ttl_s)
        with contextlib.suppress(Exception):  # everything is committed: what cannot be given up runs out by itself
            if self._newest() == self._name:
                self._home.write(self._name, replace(self._me, expires_at=0.0).encode())


def take_lease(home: Home, store: Store, *, steal: bool = False) -> Lease:
    """The lease of the log, or LeaseHeldError with the holder's name. `steal` takes it from a holder that is known to be gone or stuck."""
    if store.lease == "flock":
        assert isinstance(home, LocalHome), "flock needs a directory"
        return FlockLease(home, steal=steal)
    if store.lease == "process":
        return ProcessLease(home, steal=steal)
    return ExpiringLease(home, ttl_s=store.lease_ttl_s, steal=steal)
