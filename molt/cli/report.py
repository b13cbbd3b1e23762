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
    from molt.view.tables import print_table

    print_table(columns, rows, title=title)


def emit_error(error: BaseException, *, as_json: bool = False) -> None:
    """Print an error: boxed on stderr for people, one JSON object on stdout with --json."""
    if as_json:
        emit_json({"error": str(error), "type": type(error).__name__, "exit_code": getattr(error, "exit_code", 1)})
        return
    from molt.view.tables import print_box

    if environ.is_set("MOLT_TRACEBACK") or not isinstance(error, MoltError | OSError):
        traceback.print_exception(error)
    print_box(type(error).__name__, str(error) or type(error).__name__)


def note(text: str) -> None:
    """Print one line on stderr."""
    print(plain(text), file=sys.stderr, flush=True)


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
