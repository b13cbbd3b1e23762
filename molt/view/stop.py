"""Stopping a run by hand: the first Ctrl-C drains and seals, the second aborts, and both say so.

running --SIGINT or SIGTERM--> draining --again--> aborting (the main task is cancelled) --again--> KeyboardInterrupt at once
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED_BY_HAND = 130
"""Exit code of what a signal ended before its work was done, drained or not."""


class Stopper:
    """Turns signals into a state that a loop looks at. A context manager for the main thread; elsewhere it changes nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_draining = False
        """No new work is begun; what runs is finished and sealed."""
        self.is_aborting = False
        """Everything is cancelled."""
        self._say = say
        self._before: dict[int, Any] = {}
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        try:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
        except RuntimeError:
            self._loop = self._task = None
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._caught) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.is_draining:
            self.is_draining = True
            self._tell(f"{name}: draining, no new rollouts; the run ends and seals after what is running. Again aborts")
        elif not self.is_aborting and self._task is not None and self._loop is not None:
            self.is_aborting = True
            self._tell(f"{name}: aborting; the log keeps what was acknowledged. `molt train --resume` goes on")
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            raise KeyboardInterrupt

    def _tell(self, text: str) -> None:
        """Say it outside the handler, which may have interrupted a lock that saying needs."""
        threading.Thread(target=self._say, args=(text,), name="molt-stopper", daemon=True).start()
