"""The live view of a run: a panel on a terminal, key=value lines elsewhere, and a heartbeat that names what is waited for.

pipeline --waiting, step, note--> Progress --panel, refreshed by rich's thread--> terminal
                                      `----line per step; heartbeat thread when nothing came for heartbeat_s----> log
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from molt.config import Config
from molt.view.journal import Journal
from molt.view.line import key_values, rejected_share, step_line
from molt.view.pace import Pace, duration
from molt.view.plain import plain
from molt.view.stop import Stopper
from molt.view.tables import console

__all__ = ["Progress", "Stopper"]

HEARTBEAT_S = 20.0


class NamedRun(Protocol):
    """What the view needs of a run."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...


class Progress:
    """What a run shows of itself. A context manager; every method may be called from any thread."""

    def __init__(
        self,
        config: Config,
        *,
        run: NamedRun | None = None,
        num_steps: int | None = None,
        file: Any = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.run = run
        self.pace = Pace(num_steps=config.train.num_steps if num_steps is None else num_steps, began=clock())
        self.what = "starting"
        """What is waited for."""
        self.figures: Mapping[str, Any] = {}
        """Of the newest step."""
        self._clock = clock
        self._file = sys.stdout if file is None else file
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._since = self._said = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._journal = Journal(run.path) if run is not None else None

    def __enter__(self) -> Self:
        if self._file.isatty():
            self._live = Live(get_renderable=self.render, console=console(self._file), refresh_per_second=4, redirect_stdout=True)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._beat, name="molt-heartbeat", daemon=True)
            self._thread.start()
        if self.run is not None:
            self.note(f"run {self.run.path}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._journal is not None:
            self._journal.close(error)
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join(5.0)

    def waiting(self, what: str) -> None:
        """Say what is waited for from now on. A heartbeat names it when it takes long."""
        with self._lock:
            if what != self.what:
                self.what, self._since = what, self._clock()

    def step(self, figures: Mapping[str, Any]) -> None:
        """Show the end of a step: step, reward, n_sampled, n_kept, lag, ready, running and whatever else there is."""
        with self._lock:
            now = self._clock()
            self.pace.add(now, figures)
            self.figures = figures
            self._said = now
            line = step_line(figures, self.pace)
        self._keep(line)
        if self._live is None:
            self._print(line)

    def note(self, text: str) -> None:
        """Say one line."""
        with self._lock:
            self._said = self._clock()
        self._keep(key_values({"note": text}))
        if self._live is not None:
            self._live.console.print(Text(plain(text)))
        else:
            self._print(key_values({"note": text}))

    def render(self) -> Panel:
        """The panel as it stands."""
        with self._lock:
            figures, pace, waited = dict(self.figures), self.pace, self._clock() - self._since
            table = Table.grid(padding=(0, 2), expand=True)
            for _ in range(2):
                table.add_column(justify="left", style="dim", no_wrap=True)
                table.add_column(justify="left", ratio=1)
            cells = [(name, Text(plain(value))) for name, value in _cells(figures, pace)]
            for left, right in zip(cells[::2], cells[1::2], strict=True):
                table.add_row(*left, *right)
            body = Table.grid(expand=True)
            done = 0 if pace.step is None else pace.step + 1
            if pace.num_steps:
                body.add_row(ProgressBar(total=pace.num_steps, completed=done))
            body.add_row(table)
            body.add_row(Text(plain(f"{self.what}, {duration(waited)}"), style="yellow" if waited > self._heartbeat_s else ""))
        title = "molt" if self.run is None else f"molt  {self.run.path.name}"
        return Panel(
            body, title=Text(plain(title)), title_align="left", subtitle=Text("Ctrl-C drains, twice aborts"), subtitle_align="right"
        )

    def _beat(self) -> None:
        """Name what is waited for whenever nothing was said for heartbeat_s."""
        while not self._ended.wait(min(1.0, self._heartbeat_s)):
            with self._lock:
                now = self._clock()
                is_due = now - self._said >= self._heartbeat_s
                line = key_values({"waiting": self.what, "for": duration(now - self._since), "step": self.pace.step})
                if is_due:
                    self._said = now
            if is_due:
                self._keep(line)
                self._print(line)

    def _keep(self, line: str) -> None:
        if self._journal is not None:
            self._journal.add(line)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


def _cells(figures: Mapping[str, Any], pace: Pace) -> list[tuple[str, str]]:
    """Name and text of each cell, an even number."""
    share = rejected_share(figures)
    done = "-" if pace.step is None else str(pace.step + 1)
    return [
        ("step", done if pace.num_steps is None else f"{done} of {pace.num_steps}"),
        ("time left", duration(pace.eta_s)),
        ("reward", f"{_number(figures.get('reward'))}  (mean of {len(pace.rewards)}: {_number(pace.reward)})"),
        ("effective tokens/s", _number(pace.tokens_per_s)),
        ("policy version", _number(figures.get("version"))),
        ("lag", _number(figures.get("lag"))),
        ("groups ready, running", f"{_number(figures.get('ready'))}, {_number(figures.get('running'))}"),
        ("rejected", "-" if share is None else f"{share:.1%}"),
        ("loss", _number(figures.get("loss"))),
        ("train, log, wait", ", ".join(_seconds(figures.get(name)) for name in ("train_s", "log_s", "wait_s"))),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}s" if value < 10 else duration(value)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
