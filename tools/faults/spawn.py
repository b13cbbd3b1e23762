"""Processes that are killed: forked from a server that has imported everything and opened nothing."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from molt.log import crash

T = TypeVar("T")
_MOST_BYTES = 12 << 30
"""Address space of a victim: a damaged length may ask for all there is."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tools.faults.preload"])


def _live(work: Callable[..., Any], arguments: tuple[Any, ...], crashpoint: str | None) -> None:
    crash.arm(crashpoint)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    work(*arguments)


class Victim:
    """One process; it dies at its crash point, or when it is killed."""

    def __init__(self, work: Callable[..., Any], *arguments: Any, crashpoint: str | None = None) -> None:
        self._process = _CONTEXT.Process(target=_live, args=(work, arguments, crashpoint), daemon=True)
        self._process.start()

    @property
    def is_dead(self) -> bool:
        """True when it has ended."""
        return not self._process.is_alive()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def wait(self, limit_s: float) -> bool:
        """Wait until it has ended; False at the limit."""
        self._process.join(limit_s)
        return self.is_dead

    def kill(self) -> None:
        """SIGKILL it and wait."""
        self._process.kill()
        self._process.join()

    @property
    def was_killed(self) -> bool:
        """True when SIGKILL ended it."""
        return self._process.exitcode == -signal.SIGKILL

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing says it."""
        return self._process.exitcode


def _keep(work: Callable[..., Any], arguments: tuple[Any, ...], path: str) -> None:
    Path(path).write_bytes(pickle.dumps(work(*arguments)))


def in_child(work: Callable[..., T], *arguments: Any, limit_s: float = 300.0) -> T:
    """Run a function in a process of its own and return what it returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        victim = Victim(_keep, work, arguments, str(path))
        assert victim.wait(limit_s), f"{work.__name__} took more than {limit_s} s"
        assert victim.exitcode == 0, f"{work.__name__} ended with {victim.exitcode}"
        result: T = pickle.loads(path.read_bytes())
        return result
