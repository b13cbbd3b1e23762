"""Processes that end with the one that started their engine: vLLM's core outlives a parent that was killed, and keeps its GPU.

engine process (names itself in MOLT_ENGINE_PID) --starts--> vLLM core --starts--> vLLM worker --imports--> end_with_engine
             `-- is gone, however it ended ----------------------------------------> kills the core above it, then itself
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

from molt import environ

_LOOK_S = 1.0


def name_engine() -> None:
    """Let processes that this one starts from now on end with it."""
    environ.force("MOLT_ENGINE_PID", str(os.getpid()))


def end_with_engine() -> None:
    """Watch the engine's process from a thread; nothing happens in that process itself, and where none has named itself."""
    engine = int(environ.read("MOLT_ENGINE_PID", "0") or 0)
    if engine and engine != os.getpid():
        threading.Thread(target=_end_with, args=(engine, _core_below(engine)), name="lifeline", daemon=True).start()


def _end_with(engine: int, core: int | None) -> None:
    _await_end(engine)
    if core is not None and core == os.getppid():  # one that is gone may have left its number to another
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _core_below(engine: int) -> int | None:
    """This process's parent, when that stands between it and the engine."""
    pid = parent = os.getppid()
    while pid > 1 and pid != engine:
        pid = _parent_of(pid)
    return parent if pid == engine != parent else None


def _parent_of(pid: int) -> int:
    try:
        # The name before it stands in parentheses and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _await_end(pid: int) -> None:
    """Return once a process is gone. One that ended and was not waited for by its parent is gone too."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        while not ready.poll(_LOOK_S * 1000):
            continue
    finally:
        os.close(descriptor)
