"""Graders for tests: good ones, and every way in which one can misbehave."""

from __future__ import annotations

import os
import time


def answers() -> int:
    """Descriptor of the pipe that the answers go through."""
    return next(
        fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe")
    )


def double(number: int) -> int:
    """A good one."""
    return 2 * number


def misbehave(how: str) -> object:
    """Does what it is told."""
    if how == "sleep":
        time.sleep(600)
    if how == "compute":
        return 10 ** (10**9)  # one C call that no signal handler interrupts
    if how == "memory":
        return len(bytearray(8 << 30))
    if how == "die":
        os._exit(3)
    if how == "raise":
        raise KeyError("no such label")
    if how == "print":
        print("noise")
    if how == "unpicklable":
        return object()
    if how == "nan":
        return {"score": [1.0, float("nan")]}
    if how == "die while answering":
        os.write(answers(), b'{"val')
        os._exit(3)
    return "fine"
