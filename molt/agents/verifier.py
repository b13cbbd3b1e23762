"""Graders that may hang, run in processes of their own that are killed when time is up.

    verify(args) --> idle process --- JSON line ---> function(*args)
                         ^                               | in time: its JSON result
                         |                               | raised: its error, in words
                         '--- killed and replaced <------' late, or died: no result; nobody else waits for it

A signal or a thread cannot stop a grader inside a C loop or a power tower; a process can be stopped always. What a grader
could not decide is unscorable, never 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from molt.errors import AgentError

PROGRAM = Path(__file__).with_name("verifier_process.py")
START_TIMEOUT_S = 120.0
"""Longest start of one process, its imports included."""
QUEUE_TIMEOUT_S = 300.0
"""Longest wait for an idle process."""
MAX_LINE = 1 << 24
"""Longest answer in bytes."""


class VerdictKind(StrEnum):
    """How one call of a grader ended."""

    DONE = "done"
    RAISED = "raised"
    """The grader raised."""
    TIMEOUT = "timeout"
    """It was killed at its limit."""
    DIED = "died"
    """Its process ended by itself (out of memory, a crash)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a grader said, or why it said nothing."""

    kind: VerdictKind
    value: Any = None
    """The grader's result; None unless done."""
    error: str = ""

    @property
    def unscorable(self) -> str | None:
        """Why the rollout cannot be graded; None when it was."""
        return None if self.kind is VerdictKind.DONE else f"verifier {self.kind}" + (f": {self.error}" if self.error else "")


class Verifier:
    """A few processes that call one module-level function. Arguments and results are JSON."""

    def __init__(self, function: Callable[..., Any], *, num_workers: int = 1, timeout_s: float = 10.0, memory_bytes: int = 4 << 30) -> None:
        if function.__qualname__ != function.__name__:
            raise AgentError(f"Verifier({function.__qualname__}), it is no module-level function; a process can only import those")
        self._target = (str(Path(function.__code__.co_filename).resolve()), function.__name__)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_closed = True
        self.num_killed = 0

    async def start(self) -> None:
        """Make room for the processes; each is started by its first call."""
        self._is_closed = False
        for _ in range(self._num_workers):
            self._idle.put_nowait(None)

    async def close(self) -> None:
        """Kill the processes."""
        self._is_closed = True
        for process in list(self._processes):
            await self._kill(process)

    async def verify(self, *arguments: Any) -> Verdict:
        """Call the function in an idle process."""
        if self._is_closed:
            raise AgentError("Verifier.verify was called before start or after close; start it in AgentRunner.start")
        try:
            question = orjson.dumps(arguments) + b"\n"
        except orjson.JSONEncodeError as error:
            raise AgentError(
                f"arguments of Verifier.verify are not JSON: {error}; give texts without half characters, and numbers"
            ) from error
        try:
            process = await asyncio.wait_for(self._idle.get(), QUEUE_TIMEOUT_S)
        except TimeoutError as error:
            raise AgentError(f"no verifier process became idle in {QUEUE_TIMEOUT_S} s; give Verifier more num_workers") from error
        keep: asyncio.subprocess.Process | None = None
        try:
            process = process or await self._spawn()
            verdict = await self._ask(process, question)
            keep = process if verdict.kind in (VerdictKind.DONE, VerdictKind.RAISED) else None
            return verdict
        finally:
            # Whatever happened, the place in the pool is given back; a process that was not heard out is replaced.
            self._idle.put_nowait(keep)
            if keep is None and process is not None:
                await self._kill(process)

    async def _ask(self, process: asyncio.subprocess.Process, question: bytes) -> Verdict:
        assert process.stdin is not None and process.stdout is not None, "pipes were asked for"
        try:
            process.stdin.write(question)
            line = await asyncio.wait_for(process.stdout.readline(), self._timeout_s)
        except TimeoutError:
            self.num_killed += 1
            return Verdict(kind=VerdictKind.TIMEOUT, error=f"no answer in {self._timeout_s} s")
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line.endswith(b"\n"):  # it ended by itself, perhaps in the middle of an answer
            return Verdict(kind=VerdictKind.DIED)
        answer = orjson.loads(line)
        if "error" in answer:
            return Verdict(kind=VerdictKind.RAISED, error=answer["error"])
        return Verdict(kind=VerdictKind.DONE, value=answer["value"])

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Start one process and wait until it has imported the function."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), *self._target, str(self._memory_bytes), orjson.dumps(sys.path).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE,
        )
        self._processes.add(process)
        assert process.stdout is not None, "a pipe was asked for"
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except BaseException:
            await self._kill(process)
            raise
        if not ready:
            await self._kill(process)
            raise AgentError(f"the verifier process for {self._target[1]} in {self._target[0]} did not start; its error stands above")
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """End a process and what it started."""
        self._processes.discard(process)
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await asyncio.wait_for(process.wait(), START_TIMEOUT_S)
