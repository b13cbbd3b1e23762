"""A writer in a process of its own and producers that outlive it: messages and acks over a Unix socket.

WireSink.submit --Message--> serve() in the writer's process --Ack or error--> future
     one connection per life of the writer; when it breaks, every waiting future fails and the producer sends again
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from molt.errors import LogError, MoltError
from molt.log.message import Ack, Message
from molt.log.store import Store
from molt.log.writer import LogWriter


def serve(address: str, run_dir: str, store: Store, *, attempt: int = 1) -> None:
    """Open the writer and answer one client until it goes away."""
    Path(address).unlink(missing_ok=True)
    with LogWriter.open(run_dir, run="run", attempt=attempt, store=store) as writer, Listener(address) as listener:
        answer_client(writer, listener.accept())


def answer_client(writer: LogWriter, connection: Connection) -> None:
    """Take messages of one client until it says so or is gone, then let what it sent be committed."""
    lock = threading.Lock()
    try:
        connection.send("ready")
        while True:
            message = connection.recv()
            if message is None:
                break
            future = writer.submit(message)
            future.add_done_callback(lambda done, key=(message.producer, message.seq): _answer(connection, lock, key, done))
    except (EOFError, OSError):
        pass
    writer.flush()


def _answer(connection: Connection, lock: threading.Lock, key: tuple[str, int], done: Future[Ack]) -> None:
    error = done.exception()
    with lock:
        try:
            connection.send((key, error if error is not None else done.result()))
        except OSError:
            pass  # the client is gone; it will ask again


class WireSink:
    """The client: reconnects for as long as it lives."""

    run = "run"

    def __init__(self, address: str, *, attempt: int = 1) -> None:
        self.attempt = attempt
        self._address = address
        self._waiting: dict[tuple[str, int], Future[Ack]] = {}
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def connect(self, *, limit_s: float = 60.0) -> None:
        """Wait until the writer has finished with the client before and serves this one."""
        until = time.monotonic() + limit_s
        while True:
            try:
                connection: Any = Client(self._address)
                if not connection.poll(max(0.0, until - time.monotonic())):
                    raise ConnectionRefusedError("the writer serves another client")
                connection.recv()
                break
            except (FileNotFoundError, ConnectionRefusedError, EOFError, ConnectionResetError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.002)
        with self._lock:
            self._connection = connection
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                key, answer = connection.recv()
                with self._lock:
                    future = self._waiting.pop(key, None)
                if future is not None:
                    if isinstance(answer, MoltError):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        except (EOFError, OSError):
            self._break(connection)

    def _break(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(LogError("the writer is away"))

    def submit(self, message: Message) -> Future[Ack]:
        """Send a message; the future fails when the writer is away."""
        future: Future[Ack] = Future()
        with self._lock:
            connection = self._connection
            if connection is not None:
                self._waiting[message.producer, message.seq] = future
                try:
                    connection.send(message)
                    return future
                except OSError:
                    del self._waiting[message.producer, message.seq]
        future.set_exception(LogError("the writer is away"))
        return future

    def close(self) -> None:
        """Tell the writer to end."""
        with self._lock:
            if self._connection is not None:
                self._connection.send(None)
