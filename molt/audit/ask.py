"""Questions of people in SQL: one reading statement, on the locked connection, within a time limit."""

from __future__ import annotations

import difflib
import re
import threading
from pathlib import Path

import duckdb

from molt.audit.questions import Answer, ask_question, fetch, load_questions
from molt.audit.views import Pin, open_audit
from molt.errors import SettingError

TIME_LIMIT_S = 120.0
READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CALL, duckdb.StatementType.RELATION}
"""Kinds of statements that are taken; describe, show, summarize and from count as select."""


def ask(run_dir: str | Path, text: str, *, at: Pin = None, limit: int = 1000, time_limit_s: float = TIME_LIMIT_S) -> Answer:
    """Answer SQL text, or the name of a question in queries/, over one cut of a run's log."""
    with open_audit(run_dir, at) as connection:
        return ask_on(connection, text, limit=limit, time_limit_s=time_limit_s)


def ask_on(connection: duckdb.DuckDBPyConnection, text: str, *, limit: int = 1000, time_limit_s: float = TIME_LIMIT_S) -> Answer:
    """Answer on a connection that is open and locked. SettingError for anything but one reading statement."""
    questions = load_questions()
    known = questions.get(text.strip().removesuffix(".sql"))
    if known is None and re.fullmatch(r"[\w.-]+", text.strip()):
        near = difflib.get_close_matches(text.strip(), questions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(questions))}"
        raise SettingError(f"sql={text.strip()}, it is no file in queries/, and one word is no SQL; {hint}")
    if known is None:
        check_reading(connection, text)
    timer = threading.Timer(time_limit_s, connection.interrupt)
    timer.start()
    try:
        return fetch(connection, text.strip(), text, {}, limit=limit) if known is None else ask_question(connection, known, limit=limit)
    except duckdb.InterruptException:
        raise SettingError(f"sql took more than {time_limit_s:g} s; ask for less, or narrow it with where") from None
    except duckdb.Error as error:
        raise SettingError(f"sql: {error}") from None
    finally:
        timer.cancel()


def check_reading(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Refuse text that is not one statement that reads."""
    try:
        statements = connection.extract_statements(text)
    except duckdb.Error as error:
        raise SettingError(f"sql: {error}") from None
    if len(statements) != 1:
        raise SettingError(f"sql holds {len(statements)} statements; give one")
    if statements[0].type not in READING:
        raise SettingError(
            f"sql is a {statements[0].type.name.lower()} statement; only reading is possible, begin with select, from or describe"
        )
