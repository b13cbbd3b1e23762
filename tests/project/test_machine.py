"""What a process tells of itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal
from molt.machine import show_stacks_on_signal

def stands_here():
    os.kill(os.getpid(), signal.SIGUSR1)

show_stacks_on_signal()
stands_here()
print("goes on")
"""


def test_a_process_says_where_its_threads_are_when_it_is_asked() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "stands_here" in ended.stderr and ended.stdout == "goes on\n"
