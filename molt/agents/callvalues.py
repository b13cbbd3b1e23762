"""Values of tool calls: JSON without exceptions, and texts between tags by the schema of the tool."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_DECODER = json.JSONDecoder()
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""As templates write them that print values by Python."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def read_json(text: str) -> Any:
    """A JSON value; ValueError for what is none: NaN, a number beyond all, a key that stands twice, half a character, endless depth."""
    try:
        said = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once_each)
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds an escape of half a character") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return said


def end_of_json(text: str, start: int) -> int | None:
    """Where the JSON value that begins here, or after blanks, ends; None when it is not whole."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def typed(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """A text as the type that the schema gives an argument; the text itself where it gives none. ValueError when it is not of that type."""
    kinds = _kinds_of(schema, key)
    others = kinds - {"string"}
    if not others:
        return text
    try:
        value = read_json(PYTHON_WORDS.get(text.strip(), text))
        if any(_is_of(value, kind) for kind in others):
            return value
    except ValueError:
        pass
    if "string" in kinds:
        return text
    raise ValueError(f"it must be {' or '.join(sorted(others))}")


def _kinds_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types of an argument that its schema names."""
    properties = schema.get("properties")
    said = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(said, Mapping):
        return set()
    kinds: set[str] = set()
    for one in (said, *(item for word in ("anyOf", "oneOf") for item in said.get(word) or () if isinstance(item, Mapping))):
        kind = one.get("type")
        kinds |= {kind} if isinstance(kind, str) else set(kind or ())
    return kinds & _KINDS.keys()


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, bool) and kind != "boolean")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is larger than any number here")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
