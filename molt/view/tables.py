"""Tables and boxes on the terminal; every cell is made harmless first."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from molt import environ
from molt.view.plain import plain

PLAIN_WIDTH = 160
"""Characters in a line where stdout is no terminal and COLUMNS is not set."""


def console(file: Any = None) -> Console:
    """A console that takes text as it is: no markup, no emoji, no guessing of colours."""
    target = sys.stdout if file is None else file
    asked = environ.read("COLUMNS")
    width = None if target.isatty() else int(asked) if asked and asked.isdigit() else PLAIN_WIDTH
    return Console(file=target, width=width, highlight=False, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print a table on stdout."""
    table = Table(title=None if title is None else Text(plain(title)), box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    for name in columns:
        table.add_column(Text(plain(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(_cell(value)), justify="right" if _is_number(value) else "left") for value in row))
    console().print(table)


def print_box(title: str, text: str, *, file: Any = None) -> None:
    """Print text in a box, on stderr unless told otherwise."""
    panel = Panel(Text(plain(text)), title=Text(plain(title)), title_align="left", border_style="red")
    console(sys.stderr if file is None else file).print(panel)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return value.hex()
    return value
