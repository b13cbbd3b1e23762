"""The questions in queries/: one SQL file each, read with its English, its parameters and its grain, and asked on a connection.

A question about every token is asked in parts: DuckDB takes 2,048 rows at a time through lists of what is computed for each token, which
for long segments is more than a machine has. A part shows a window of segments that hold a bounded number of tokens, and their scores.
A question about every place of every plan is asked in parts, too: of plans that hold a bounded number of segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb

from molt.errors import SettingError
from molt.places import folder

INVARIANT = "empty when all is well"
IN_PARTS = "asked in parts"
IN_PARTS_OF_PLANS = "asked in parts of plans"
LAST_LINE = "select * from answer"
PART_TOKENS = 1 << 20
"""Tokens in the segments of one part, at up to 300 bytes of lists each."""
PART_PLACES = 1 << 19
"""Segments in the plans of one part, at about 2,500 bytes of what a plan says of each."""
MOST_VALUES = 1 << 20
"""In lists of an answer: a thousand segments of 300,000 tokens would be more Python numbers than a machine has."""
_ROWS_AT_ONCE = 8
WINDOW = ("first_segment", "last_segment", "first_score", "last_score")
"""Variables of the views full_segments and full_scores: the lsn that they begin and end at."""
PLAN_WINDOW = ("first_plan", "last_plan")
"""Variables of the view shown_plans."""
LIGHT = """
select segments.lsn, segments.n_tokens, min(scores.lsn), max(scores.lsn)
from segments left join scores using (segment_id) where segment_id = coalesce($segment_id, segment_id)
group by segments.lsn, segments.n_tokens order by segments.lsn
"""
LIGHT_PLANS = "select lsn, num_segments from batch_planned order by lsn"


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
    parts_of: Literal["segments", "plans"] | None
    """Its answer is the rows that windows of these answer, each once; None: it is asked of the whole."""
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
        parts_of="segments" if IN_PARTS in head else "plans" if IN_PARTS_OF_PLANS in head else None,
        sql=text,
    )


def ask_question(connection: duckdb.DuckDBPyConnection, question: Question, *, limit: int = 1000, **given: Any) -> Answer:
    """Ask one question; parameters that are not given take their defaults."""
    unknown = sorted(set(given) - set(question.parameters))
    if unknown:
        raise SettingError(f"query={question.name}, it has no parameter {unknown[0]}; it takes {', '.join(question.parameters) or 'none'}")
    parameters = {**question.parameters, **given}
    if question.parts_of is None:
        return fetch(connection, question.name, question.sql, parameters, limit=limit)
    rows: dict[tuple[Any, ...], None] = {}
    columns: tuple[str, ...] = ()
    is_cut = False
    shown = plan_windows(connection) if question.parts_of == "plans" else windows(connection, parameters.get("segment_id"))
    with closing(shown) as parts:
        for _ in parts:
            part = fetch(connection, question.name, question.sql, parameters, limit=limit)
            columns = part.columns
            rows |= dict.fromkeys(part.rows)
            is_cut = part.is_cut or len(rows) > limit
            if is_cut:
                break
    return Answer(question=question.name, columns=columns, rows=list(rows)[:limit], is_cut=is_cut)


def windows(connection: duckdb.DuckDBPyConnection, segment_id: str | None) -> Generator[None]:
    """Let the connection show one window of full segments and scores after the other, together all of them; at the end the whole again.

    segment_id: of a question about one segment, which is then the only one.
    """
    found: list[list[int]] = []
    n_tokens = 0
    for lsn, length, first_score, last_score in connection.execute(LIGHT, {"segment_id": segment_id}).fetchall():
        n_tokens += length
        if not found or n_tokens > PART_TOKENS:
            found.append([lsn, lsn, -1, -1])
            n_tokens = length
        window = found[-1]
        window[1] = lsn
        if first_score is not None:
            window[2:] = [first_score if window[2] < 0 else min(window[2], first_score), max(window[3], last_score)]
    yield from _shown(connection, WINDOW, found)


def plan_windows(connection: duckdb.DuckDBPyConnection) -> Generator[None]:
    """The same of plans."""
    found: list[list[int]] = []
    num_places = 0
    for lsn, num_segments in connection.execute(LIGHT_PLANS).fetchall():
        num_places += num_segments
        if not found or num_places > PART_PLACES:
            found.append([lsn, lsn])
            num_places = num_segments
        found[-1][1] = lsn
    yield from _shown(connection, PLAN_WINDOW, found)


def _shown(connection: duckdb.DuckDBPyConnection, names: tuple[str, ...], found: list[list[int]]) -> Generator[None]:
    """Set the variables of each window in turn; one that shows nothing where there is none."""
    try:
        for window in found or [[-1] * len(names)]:
            for name, lsn in zip(names, window, strict=True):
                connection.execute(f"set variable {name} = {lsn}")
            yield
    finally:
        for name in names:
            connection.execute(f"reset variable {name}")


def fetch(connection: duckdb.DuckDBPyConnection, name: str, sql: str, parameters: dict[str, Any], *, limit: int) -> Answer:
    """Run one statement and take at most limit rows; fewer where lists in them hold more than MOST_VALUES together."""
    cursor = connection.execute(sql, parameters or None)
    columns = tuple(column[0] for column in cursor.description or ())
    rows: list[tuple[Any, ...]] = []
    n_values = 0
    while n_values <= MOST_VALUES and (part := cursor.fetchmany(min(_ROWS_AT_ONCE, limit + 1 - len(rows)))):
        rows += part
        n_values += sum(len(cell) for row in part for cell in row if isinstance(cell, list))
    is_cut = len(rows) > limit or (n_values > MOST_VALUES and cursor.fetchone() is not None)
    return Answer(question=name, columns=columns, rows=rows[:limit], is_cut=is_cut)


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
