"""Small JSON files that carry their own digest, and reads of tables whose damage has a name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import orjson

from molt.errors import CorruptLogError, MoltError
from molt.log.digest import bytes_digest

CHECK = "check"
"""Field that holds the digest of all others."""


def encode(fields: Any) -> bytes:
    """A JSON object (or dataclass) with its digest."""
    plain = orjson.loads(orjson.dumps(fields))
    return orjson.dumps({**plain, CHECK: _digest(plain)}, option=orjson.OPT_INDENT_2) + b"\n"


def decode(content: bytes, name: str) -> dict[str, Any]:
    """The fields; CorruptLogError when a single bit differs."""
    try:
        fields = orjson.loads(content)
        check = fields.pop(CHECK)
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CorruptLogError(f"{name} is damaged: {error}; run molt fsck") from error
    if _digest(fields) != check:
        raise CorruptLogError(f"{name} is damaged: it fails its digest; run molt fsck")
    return dict(fields)


def _digest(fields: Any) -> str:
    return bytes_digest(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hex()


def is_panic(error: BaseException) -> bool:
    """True for a panic of Lance on damaged bytes: it is no Exception, and no reason to end the process."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Turn a panic of Lance into a ValueError, as its other complaints about damaged bytes are."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(f"panic: {error}") from error


def is_gone(error: BaseException) -> bool:
    """True when a file was not there: clean-up took the version, and a newer one holds the same rows."""
    return "not found" in str(error).lower()


def reason_of(error: BaseException) -> str:
    """What Lance said, without the places in its own source."""
    return str(error).split(", /home/")[0].split(", /rustc/")[0][:300]


@contextlib.contextmanager
def damage_named(where: str, *, may_be_gone: bool = True) -> Iterator[None]:
    """Turn what Lance raises on unreadable bytes into CorruptLogError with the place and the way out.

    A file that is not there is left as it is for a second try from a newer version; with may_be_gone=False it is damage too.
    """
    try:
        yield
    except MoltError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if may_be_gone and is_gone(error):
            raise
        raise CorruptLogError(f"{where} cannot be read: {type(error).__name__}: {reason_of(error)}; run molt verify") from error
