"""Helpers of the command line tests: run one line in this process, capture what it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from molt.cli.app import run


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def molt(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs `molt WORDS` in this process."""

    def call(*words: str) -> Said:
        code = run(words)
        printed = capsys.readouterr()
        return Said(code=code, out=printed.out, err=printed.err)

    return call
