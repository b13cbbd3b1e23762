"""What each setting is called, takes and means, read from the source of molt/config.py, for `molt settings` and the docs."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

from molt import config as config_module
from molt.config import Config, Room


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDoc:
    """One setting."""

    key: str
    kind: str
    """Type as written."""
    default: Any
    meaning: str
    """The line under the field; empty when its name says all."""


def describe() -> list[SettingDoc]:
    """Every setting, in the order of the tree."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(config_module)).body if isinstance(node, ast.ClassDef)}
    return _describe(Config, "", classes)


def _describe(model: type[Room], prefix: str, classes: dict[str, ast.ClassDef]) -> list[SettingDoc]:
    docs: list[SettingDoc] = []
    body = classes[model.__name__].body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        field = model.model_fields[name]
        if isinstance(field.annotation, type) and issubclass(field.annotation, Room):
            docs.extend(_describe(field.annotation, f"{prefix}{name}.", classes))
            continue
        is_documented = (
            isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str)
        )
        meaning = " ".join(following.value.value.split()) if is_documented else ""  # type: ignore[union-attr]
        docs.append(SettingDoc(key=f"{prefix}{name}", kind=ast.unparse(node.annotation), default=field.default, meaning=meaning))
    return docs
