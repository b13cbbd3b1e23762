"""Graders for tests: good ones, and every way in which one can misbehave."""

from __future__ import annotations

import os
import time


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
    return "fine"
