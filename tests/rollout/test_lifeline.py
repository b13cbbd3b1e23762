"""Processes of an engine that is killed end with it, and no others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SAY = "import os, subprocess, sys, time; print(os.getpid(), flush=True)"
WORKER = f"from molt.rollout.lifeline import end_with_engine; end_with_engine(); {SAY}; time.sleep(60)"
CORE = f"{SAY}; subprocess.Popen([sys.executable, '-c', {WORKER!r}]); time.sleep(60)"
ENGINE = """
import subprocess, sys
from molt.rollout.lifeline import name_engine

_, program, is_named = sys.argv
if is_named == "True":
    name_engine()
subprocess.Popen([sys.executable, "-c", program])
sys.stdin.read()
"""


def is_there(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pids: list[int], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while any(is_there(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(is_there(pid) for pid in pids)


@pytest.mark.parametrize(("program", "is_named"), [(WORKER, True), (CORE, True), (CORE, False)])
def test_what_an_engine_started_ends_with_it_however_it_ends(program: str, is_named: bool) -> None:
    command = [sys.executable, "-c", ENGINE, program, str(is_named)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(engine.stdout.readline()) for _ in range(1 if program is WORKER else 2)]
        assert all(is_there(pid) for pid in pids)
        engine.kill()
    is_over = gone_within(pids, 20.0 if is_named else 0.5)
    for pid in filter(is_there, pids):
        os.kill(pid, signal.SIGKILL)
    assert is_over is is_named
