"""Cases of kernels in a process whose Triton interprets them, on the CPU: it decides so at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_interpreted(cases: Path) -> None:
    """Run a file of tests so; skips without triton, and shows what failed."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
