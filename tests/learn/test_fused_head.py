"""The kernels of the fused head give values and gradients of the plain head, interpreted on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted


def test_fused_head_passes_its_cases_under_the_interpreter():
    run_interpreted(Path(__file__).with_name("fused_head_cases.py"))
