"""What a verb prints: JSON with --json, else tables and plain lines; errors in a box on stderr without a traceback."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from molt import environ
from molt.errors import MoltError
from molt.view.plain import plain


def emit_json(data: Any) -> None:
    """Print one JSON document on stdout. What is not finite becomes null, bytes become hex."""
    print(json.dumps(_jsonable(data), indent=2, ensure_ascii=True, allow_nan=False))


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print a table on stdout; every cell is made harmless for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    for name in columns:
        table.add_column(Text(plain(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(_cell(value)), justify="right" if isinstance(value, int | float) else "left") for value in row))
    _console(sys.stdout).print(table)


def emit_error(error: BaseException, *, as_json: bool = False) -> None:
    """Print an error: boxed on stderr for people, one JSON object on stdout with --json."""
    if as_json:
        emit_json({"error": str(error), "type": type(error).__name__, "exit_code": getattr(error, "exit_code", 1)})
        return
    from rich.panel import Panel
    from rich.text import Text

    console = _console(sys.stderr)
    if environ.is_set("MOLT_TRACEBACK") or not isinstance(error, MoltError | OSError):
        traceback.print_exception(error)
    text = Text(plain(error) or type(error).__name__)
    console.print(Panel(text, title=Text(type(error).__name__), title_align="left", border_style="red"))


def note(text: str) -> None:
    """Print one line on stderr."""
    print(plain(text), file=sys.stderr, flush=True)


def _console(file: Any) -> Any:
    from rich.console import Console

    width = environ.read("COLUMNS")
    wide = None if file.isatty() else int(width) if width and width.isdigit() else 160
    return Console(file=file, width=wide, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return value.hex()
    return value


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return _jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)
