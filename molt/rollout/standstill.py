"""Whether the loop of a process still turns, asked from another thread: an agent that does not await stops every rollout beside it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A loop that does not turn."""

    task: str | None
    """Name of the task that holds it."""
    place: str
    """File and line where it is; its agent's own, if it is known."""
    seconds: float
    """How long it was seen to stand."""


class LoopWatch:
    """Made in the loop that it watches. Each look asks the loop for a sign, and waits for it a little."""

    def __init__(self, agent_path: str | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._agent_path = agent_path
        self._turned = threading.Event()
        self._asked: float | None = None
        """When the sign that did not come yet was asked for."""

    def look(self, limit_s: float) -> Standstill | None:
        """What holds the loop; None when it turns within the limit. Called from one other thread."""
        if self._asked is None:
            self._turned.clear()
            self._asked = time.monotonic()
            self._loop.call_soon_threadsafe(self._turned.set)
        if self._turned.wait(limit_s):
            self._asked = None
            return None
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)
        return Standstill(
            task=None if task is None else task.get_name(),
            place="an unknown place" if frame is None else self._place(frame),
            seconds=time.monotonic() - self._asked,
        )

    def _place(self, frame: FrameType) -> str:
        stack = traceback.extract_stack(frame)
        found = next((entry for entry in reversed(stack) if entry.filename == self._agent_path), stack[-1])
        return f"{found.filename}:{found.lineno} in {found.name}"
