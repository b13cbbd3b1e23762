"""Text from models, agents and files made harmless for a terminal: control, escape and direction characters become visible."""

from __future__ import annotations

import unicodedata

KEPT = frozenset("\t\n")
"""Control characters that pass."""


def plain(text: object, *, limit: int | None = None) -> str:
    """The text with every control, format and surrogate character written as an escape, cut to limit characters."""
    source = str(text)
    if limit is not None and len(source) > limit:
        source = source[: max(0, limit - 1)] + "…"
    if source.isascii() and source.isprintable():
        return source
    return "".join(char if char in KEPT or not _is_hidden(char) else _escape(char) for char in source)


def _is_hidden(char: str) -> bool:
    """Category C: control, format (bidirectional marks among them), surrogate, private use, unassigned; and line separators."""
    return unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("Zl", "Zp")


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
