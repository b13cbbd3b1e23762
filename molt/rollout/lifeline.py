"""Processes that end with the one that started their engine: vLLM's core outlives a parent that was killed, and keeps its GPU.

engine process (names itself in MOLT_ENGINE_PID) --starts--> vLLM core --starts--> vLLM worker --imports--> end_with_engine
             `-- is gone, however it ended ----------------------------------------> kills vLLM's other processes, then itself
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
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
        threading.Thread(target=_end_with, args=(engine, _kin_of(engine)), name="lifeline", daemon=True).start()


def _end_with(engine: int, kin: dict[int, str]) -> None:
    _await_end(engine)
    for pid, began in kin.items():
        if _facts(pid)[1] == began:  # a number may have gone to another process meanwhile
            with suppress(ProcessLookupError):  # another worker was quicker
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _kin_of(engine: int) -> dict[int, str]:
    """Processes that the engine started, by number, and when each began: the core above this one, and what else vLLM calls its own."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = {pid: began for pid, (parent, began) in ((pid, _facts(pid)) for pid in numbers) if parent == engine}
    return {pid: began for pid, began in found.items() if pid == os.getppid() or _name(pid).startswith("VLLM::")}


def _facts(pid: int) -> tuple[int, str]:
    """Parent and start of a process; 0 and nothing when it is gone."""
    try:
        # The name before them stands in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


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
