"""The audit of a run: every invariant asked over one cut, and the token ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from molt.audit.questions import Answer, Question, ask_question, load_questions
from molt.audit.views import Pin, open_audit

SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One invariant and the rows that break it."""

    question: Question
    answer: Answer
    seconds: float

    @property
    def is_well(self) -> bool:
        """No row breaks it."""
        return not self.answer.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """Sampled tokens of one fate and reason."""

    fate: str
    reason: str
    n_tokens: int
    num_segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the audit found."""

    findings: tuple[Finding, ...]
    ledger: tuple[LedgerLine, ...]

    @property
    def is_well(self) -> bool:
        """Every invariant is empty."""
        return all(finding.is_well for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "is_well": self.is_well,
            "invariants": [
                {
                    "name": finding.question.name,
                    "question": finding.question.english,
                    "is_well": finding.is_well,
                    "rows": [dict(zip(finding.answer.columns, row, strict=True)) for row in finding.answer.rows],
                    "seconds": round(finding.seconds, 4),
                }
                for finding in self.findings
            ],
            "ledger": [
                {"fate": line.fate, "reason": line.reason, "n_tokens": line.n_tokens, "num_segments": line.num_segments}
                for line in self.ledger
            ],
        }


def audit_run(run_dir: str | Path, *, at: Pin = None) -> AuditReport:
    """Audit a run over one consistent cut of its log."""
    with open_audit(run_dir, at) as connection:
        return audit_connection(connection)


def audit_connection(connection: duckdb.DuckDBPyConnection) -> AuditReport:
    """Audit what a connection shows."""
    return AuditReport(findings=run_queries(connection), ledger=token_ledger(connection))


def run_queries(connection: duckdb.DuckDBPyConnection) -> tuple[Finding, ...]:
    """Ask every invariant of queries/."""
    findings = []
    for question in load_questions().values():
        if question.is_invariant:
            started = time.perf_counter()
            answer = ask_question(connection, question, limit=SHOWN_ROWS)
            findings.append(Finding(question=question, answer=answer, seconds=time.perf_counter() - started))
    return tuple(findings)


def token_ledger(connection: duckdb.DuckDBPyConnection) -> tuple[LedgerLine, ...]:
    """Where every sampled token went; the first line is what was generated, the others add up to it."""
    answer = ask_question(connection, load_questions()["ledger"])
    return tuple(LedgerLine(fate=row[0], reason=row[1], n_tokens=row[2], num_segments=row[3]) for row in answer.rows)
