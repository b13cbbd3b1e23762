"""The questions in queries/: one SQL file each, read with its English, its parameters and its grain, and asked on a connection."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from molt.errors import SettingError
from molt.places import folder

INVARIANT = "empty when all is well"
LAST_LINE = "select * from answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One file of queries/."""

    name: str
    english: str
    """Line one."""
    parameters: dict[str, Any]
    """Name to default."""
    grain: str
    is_invariant: bool
    """Any row is a fault."""
    sql: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows of one question."""

    question: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool
    """There are more rows than these."""


def load_questions(where: Path | None = None) -> dict[str, Question]:
    """Every question by name. SettingError for a file that breaks the form."""
    return {path.stem: read_question(path) for path in sorted((where or folder("queries")).glob("*.sql"))}


def read_question(path: Path) -> Question:
    """Read one file: the question in English, parameters, grain, perhaps "empty when all is well", SQL, the last line."""
    text = path.read_text(encoding="utf-8")
    head = [line[2:].strip() for line in _comment_lines(text)]
    if len(head) < 3 or not head[0].endswith("?"):
        raise SettingError(f"query={path}, line 1 is not a question in English; begin with `-- ... ?`")
    parameters, grain = _after(path, head, "parameters:"), _after(path, head, "grain:")
    if text.rstrip().splitlines()[-1] != LAST_LINE:
        raise SettingError(f"query={path}, its last line is not `{LAST_LINE}`; name the result answer")
    return Question(
        name=path.stem,
        english=head[0],
        parameters=_parameters(parameters),
        grain=grain,
        is_invariant=INVARIANT in head,
        sql=text,
    )


def ask_question(connection: duckdb.DuckDBPyConnection, question: Question, *, limit: int = 1000, **given: Any) -> Answer:
    """Ask one question; parameters that are not given take their defaults."""
    unknown = sorted(set(given) - set(question.parameters))
    if unknown:
        raise SettingError(f"query={question.name}, it has no parameter {unknown[0]}; it takes {', '.join(question.parameters) or 'none'}")
    return fetch(connection, question.name, question.sql, {**question.parameters, **given}, limit=limit)


def fetch(connection: duckdb.DuckDBPyConnection, name: str, sql: str, parameters: dict[str, Any], *, limit: int) -> Answer:
    """Run one statement and take at most limit rows."""
    cursor = connection.execute(sql, parameters or None)
    columns = tuple(column[0] for column in cursor.description or ())
    rows = cursor.fetchmany(limit + 1)
    return Answer(question=name, columns=columns, rows=rows[:limit], is_cut=len(rows) > limit)


def _comment_lines(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line)
    return lines


def _after(path: Path, head: list[str], label: str) -> str:
    for line in head[1:]:
        if line.startswith(label):
            return line.removeprefix(label).strip()
    raise SettingError(f"query={path}, it has no line `-- {label} ...`; add it below the question")


def _parameters(text: str) -> dict[str, Any]:
    """`a = 1, b = ''` as names and defaults; `none` is no parameter."""
    if text == "none":
        return {}
    return {name: json.loads(value.replace("'", '"')) for name, value in re.findall(r"(\w+) = ('[^']*'|[^,\s]+)", text)}
