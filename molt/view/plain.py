"""Text from models, agents and files made harmless for a terminal: escapes, controls and direction marks become visible."""

from __future__ import annotations

KEPT = frozenset("\t\n")
"""Control characters that pass."""


def plain(text: object, *, limit: int | None = None) -> str:
    """The text with every character that does not print written as an escape, cut to limit characters."""
    source = str(text)
    if limit is not None and len(source) > limit:
        source = source[: max(0, limit - 1)] + "…"
    if source.isprintable():
        return source
    return "".join(char if char in KEPT or char.isprintable() else _escape(char) for char in source)


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
