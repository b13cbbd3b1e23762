"""The writer as a named Ray actor, and the sink through which other processes reach it.

worker process: Producer -> RaySink.submit --ObjectRef--> molt-log-<run> (one actor, async) -> LogWriter thread
                             ^                                |
                             +------- ack or error -----------+     the actor is restarted when it dies; producers resend
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from molt.errors import LeaseHeldError, LogError, MoltError
from molt.log.descriptor import read_descriptor
from molt.log.home import find_home
from molt.log.message import Ack, Message
from molt.log.seal import seal_log
from molt.log.store import load_store
from molt.log.writer import LogWriter

LEASE_WAIT_S = 10.0
"""Longest wait for the lease of a process that is ending."""
CALL_LIMIT_S = 60.0
"""Longest wait for a call of the actor that should take milliseconds."""
SEAL_LIMIT_S = 4 * 3600.0
"""Longest wait for a seal: it reads every byte of the log."""
_LOOK_S = 0.2


def actor_name(run: str) -> str:
    """Name of the log actor of a run."""
    return f"molt-log-{run}"


class _LogActor:
    """Runs a LogWriter. A restart takes the same attempt under a new epoch.

    A folder may have been renamed or copied since its log was begun: the log keeps the name of its run.
    """

    def __init__(self, run_dir: str, run: str, attempt: int, store: str) -> None:
        self._refusal: MoltError | None = None
        """Why the log was not opened. An error of a constructor would reach nobody but as the text of a trace."""
        try:
            home = find_home(run_dir)
            held = None if home is None else read_descriptor(home)
            self._open(run_dir, run if held is None else held.run, attempt, store)
        except MoltError as error:
            if _is_restarted():
                raise  # Ray starts it anew until it can
            self._refusal = error

    def _open(self, run_dir: str, run: str, attempt: int, store: str) -> None:
        profile = load_store(store)
        until = time.monotonic() + (LEASE_WAIT_S if profile.lease == "flock" else profile.lease_ttl_s + LEASE_WAIT_S)
        while True:
            try:
                self._writer = LogWriter.open(run_dir, run=run, attempt=attempt, store=store)
                return
            except LeaseHeldError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)  # the process before this one is still ending

    async def identity(self) -> tuple[str, int]:
        """Run and attempt; raises what kept the log from being opened."""
        if self._refusal is not None:
            raise self._refusal
        return self._writer.run, self._writer.attempt

    async def append(self, message: Message) -> Ack | MoltError:
        """The ack; an error of ours is returned, so that it arrives with its own type."""
        while not self._writer.has_room(message.size_bytes):
            await asyncio.sleep(0.005)
        try:
            return await asyncio.wrap_future(self._writer.submit(message))
        except MoltError as error:
            return error

    async def lsn_end(self) -> int:
        """Largest committed lsn."""
        return self._writer.lsn_end

    async def flush(self) -> None:
        """Commit everything submitted so far."""
        await asyncio.to_thread(self._writer.flush)

    async def seal(self) -> None:
        """Compact, and write SEAL.json over everything committed so far."""
        await asyncio.wrap_future(self._writer.between_commits(seal_log))

    async def close(self) -> None:
        """Commit what is queued and give the lease back."""
        await asyncio.to_thread(self._writer.close)


class RaySink:
    """A sink around the handle of the log actor. Picklable: pass it to other actors."""

    def __init__(self, handle: Any, *, identity: tuple[str, int] | None = None) -> None:
        self._handle = handle
        known: tuple[str, int] = identity or _answer_of(handle.identity.remote, CALL_LIMIT_S)
        self.run, self.attempt = known

    def __reduce__(self) -> tuple[Callable[..., RaySink], tuple[Any, tuple[str, int]]]:
        return _make_sink, (self._handle, (self.run, self.attempt))

    def submit(self, message: Message) -> Future[Ack]:
        """Send a message; the future fails with LogError when the actor is away, and the producer sends again."""
        future: Future[Ack] = Future()
        sent = self._handle.append.remote(message).future()
        sent.add_done_callback(lambda done: _pass_on(done, future))
        return future

    def flush(self) -> None:
        """Commit everything submitted so far."""
        _answer_of(self._handle.flush.remote, CALL_LIMIT_S)


def _is_restarted() -> bool:
    """Whether Ray has started this actor before. Its own property warns of a name that it reads itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _answer_of(call: Callable[[], Any], limit_s: float) -> Any:
    """The answer of a call that may be made twice: made again while the actor is being started anew. LogError after limit_s."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            return ray.get(call(), timeout=max(0.1, ends - time.monotonic()))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MoltError):
                raise error.cause from None
            raise LogError(f"the log actor failed, {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            if time.monotonic() > ends:
                raise LogError(f"the log actor was away for {limit_s:g} s; {str(error).splitlines()[0]}") from error
            time.sleep(_LOOK_S)


def _make_sink(handle: Any, identity: tuple[str, int]) -> RaySink:
    return RaySink(handle, identity=identity)


def _pass_on(done: Future[Any], future: Future[Ack]) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(LogError(f"log actor: {type(error).__name__}: {str(error).splitlines()[0]}"))
        return
    answer = done.result()
    if isinstance(answer, MoltError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def start_log_actor(run_dir: str | Path, *, run: str, attempt: int = 1, store: str = "durable") -> Any:
    """Start the named actor and wait until it holds the log. What keeps it from opening it is raised with its own type."""
    options: dict[str, Any] = {
        "name": actor_name(run),
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 1000,
    }
    handle = ray.remote(_LogActor).options(**options).remote(str(run_dir), run, attempt, str(store))
    try:
        ray.get(handle.identity.remote(), timeout=CALL_LIMIT_S)
    except ray.exceptions.RayTaskError as error:
        ray.kill(handle, no_restart=True)
        if isinstance(error.cause, MoltError):
            raise error.cause from None
        raise LogError(f"run={run}: the log actor did not start; {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayActorError as error:
        raise LogError(f"run={run}: the log actor did not start; {error}") from error
    return handle


def stop_log_actor(handle: Any, *, is_sealing: bool = False, limit_s: float = CALL_LIMIT_S) -> None:
    """Commit what is queued, seal where asked, give the lease back and end the actor; the last two also when a seal fails."""
    try:
        if is_sealing:
            _answer_of(handle.flush.remote, limit_s)
            _answer_of(handle.seal.remote, SEAL_LIMIT_S)
    finally:
        try:
            _answer_of(handle.close.remote, limit_s)
        finally:
            ray.kill(handle, no_restart=True)
