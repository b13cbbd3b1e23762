"""The verbs audit and sql: questions over one consistent cut of a run's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

from molt.cli.numbers import Count
from molt.cli.report import emit_json, emit_table
from molt.runs import run_place, split_pin

Switch = Annotated[bool, Parameter(negative="")]


def mount(app: App) -> None:
    """Add the verbs."""
    app.command(audit)
    app.command(sql)


def audit(run: str, *, at: str | None = None, json: Switch = False) -> int:
    """Ask every question in queries/ that is empty when all is well, and print the token ledger. Leaves with 1 when one is not empty.

    Parameters
    ----------
    run
        Folder or name of the run; RUN@PIN reads it as it was at a pin or an lsn.
    at
        The same as RUN@PIN.
    json
        Print JSON.
    """
    from molt.audit.report import audit_run
    from molt.view.audit import print_audit

    name, pin = split_pin(run)
    report = audit_run(run_place(name), at=at or pin)
    if json:
        emit_json(report.as_dict())
    else:
        print_audit(report)
    return 0 if report.is_well else 1


def sql(run: str, question: str, *, at: str | None = None, limit: Count = 1000, json: Switch = False) -> None:
    """Ask a question in SQL over the views of a run; `describe` and `show tables` list them. Nothing outside the log can be reached.

    Parameters
    ----------
    run
        Folder or name of the run; RUN@PIN reads it as it was at a pin or an lsn.
    question
        SQL text, or the name of a file in queries/.
    at
        The same as RUN@PIN.
    limit
        Most rows printed.
    json
        Print JSON.
    """
    from molt.audit.ask import ask

    name, pin = split_pin(run)
    answer = ask(run_place(name), question, at=at or pin, limit=limit)
    if json:
        columns = told_apart(answer.columns)
        rows = [dict(zip(columns, row, strict=True)) for row in answer.rows]
        emit_json({"columns": columns, "rows": rows, "is_cut": answer.is_cut})
    else:
        emit_table(answer.columns, answer.rows)
        if answer.is_cut:
            wayout = "--limit for more" if len(answer.rows) == limit else "their lists are long, select a part of each for more"
            print(f"(first {len(answer.rows)} rows; {wayout})")


def told_apart(columns: Sequence[str]) -> list[str]:
    """Names of columns, each once, as an object of JSON needs them: a join has many of the same name, and the second is name_2."""
    names: list[str] = []
    for column in columns:
        number, name = 1, column
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names
