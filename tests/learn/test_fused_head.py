"""The kernels of the fused head give values and gradients of the plain head, interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("fused_head_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_fused_head_passes_its_cases_under_the_interpreter():
    # Triton decides at its import whether it interprets, so the cases have a process of their own.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
