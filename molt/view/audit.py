"""The audit of a run on the terminal: invariants, what breaks them, and the token ledger with its sum."""

from __future__ import annotations

from collections.abc import Sequence

from molt.audit.report import AuditReport, LedgerLine
from molt.view.tables import print_table


def print_audit(report: AuditReport) -> None:
    """Every invariant, the first rows of each that is broken, then the ledger."""
    print_table(
        ("invariant", "answer", "question"),
        [
            (found.question.name, "empty" if found.is_well else f"{len(found.answer.rows)} rows", found.question.english)
            for found in report.findings
        ],
    )
    for found in report.findings:
        if not found.is_well:
            more = ", first rows" if found.answer.is_cut else ""
            print_table(found.answer.columns, found.answer.rows, title=f"{found.question.name}{more}")
    print_ledger(report.ledger)


def print_ledger(ledger: Sequence[LedgerLine]) -> None:
    """Where every sampled token went, and whether the sum closes."""
    print_table(
        ("tokens", "reason", "number", "segments or tries"), [(line.fate, line.reason, line.n_tokens, line.num_segments) for line in ledger]
    )
    generated = sum(line.n_tokens for line in ledger if line.fate == "generated")
    accounted = sum(line.n_tokens for line in ledger if line.fate != "generated")
    closes = "the ledger closes" if generated == accounted else "the ledger does not close"
    print(f"{closes}: {generated} generated, {accounted} accounted for")
