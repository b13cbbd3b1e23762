"""Named points at which a test kills the process, so that every step of the protocol can be the last one."""

from __future__ import annotations

import os
import signal

from molt.environ import read

POINTS = (
    "writer.before_data",
    "writer.after_data",
    "writer.after_sync",
    "writer.in_commit_lock",
    "writer.after_head",
    "writer.between_tables",
    "writer.before_ack",
    "writer.after_ack",
    "upkeep.before_compact",
    "upkeep.after_rewrite",
    "upkeep.after_compact",
    "upkeep.before_cleanup",
    "upkeep.after_cleanup",
    "open.after_lease",
    "open.before_roll_forward",
    "open.before_epoch",
    "seal.before_write",
    "seal.after_write",
    "pin.after_tag",
    "producer.before_send",
    "producer.after_ack",
    "reader.after_poll",
)
"""Every name that crashpoint() is called with."""

_armed = ""
_left = 0


def arm(spec: str | None) -> None:
    """Die at `name`, or at the n-th time there with `name@n`; None disarms."""
    global _armed, _left
    _armed, _, count = (spec or "").partition("@")
    _left = int(count or 1)
    assert not _armed or _armed in POINTS, f"{_armed} is not in molt.log.crash.POINTS"


arm(read("MOLT_CRASHPOINT"))


def crashpoint(name: str) -> None:
    """Kill this process with SIGKILL when MOLT_CRASHPOINT is `name` or `name@n` and this is the n-th time here."""
    global _left
    if _armed != name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
