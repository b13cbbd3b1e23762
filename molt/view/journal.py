"""driver.log of an attempt: every line that the view says, with its time, and the traceback of what ended it."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path


class Journal:
    """Lines wait until the attempt has its folder, logs/attempt_N, and go there. A disk that refuses them stops nothing."""

    def __init__(self, run_path: Path) -> None:
        self._logs = run_path / "logs"
        self._before = {path.name for path in self._logs.glob("attempt_*")}
        self._waiting: list[str] = []
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Keep one line."""
        with self._lock:
            self._waiting.append(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")
            self._flush()

    def close(self, error: BaseException | None) -> None:
        """Keep what ended the attempt, if anything did."""
        with self._lock:
            if error is not None:
                self._waiting.append("".join(traceback.format_exception(error)))
            self._flush()

    def _flush(self) -> None:
        new = sorted(path for path in self._logs.glob("attempt_*") if path.name not in self._before)
        if not new:
            return
        try:
            with (new[0] / "driver.log").open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
        except OSError:
            # The log of the run is elsewhere and has its own errors; these lines are a courtesy.
            pass
        self._waiting.clear()
