"""Who owns a folder of weights in shared memory: a run that was killed leaves gigabytes there, and the next one on that host frees them.

claim --> an open lock on <folder>/owner, which the kernel gives up when the process ends, however it ends
    `---> of every other run's folder: is the lock free? then its owner is gone, and so is the folder
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

_LOG = logging.getLogger(__name__)
_OWNER = "owner"
_RUNS = "molt-*"
_LIMIT_S = 5.0


def claim(folder: Path) -> int:
    """Make the folder this process's own, empty, and free those of runs whose process is gone. Returns the descriptor that holds it.

    One that another process of the same run does not give up in time is used all the same, as that process's own.
    """
    until = time.monotonic() + _LIMIT_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        if _is_locked(descriptor) and _is_there(folder, descriptor):
            for item in folder.glob("weights-*"):
                item.unlink()
            break
        if time.monotonic() > until:
            break
        os.close(descriptor)  # another run looks at it, or freed it between the calls
        time.sleep(0.01)
    for other in sorted(folder.parent.glob(_RUNS)):
        if other != folder:
            _free(other)
    return descriptor


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat((folder / _OWNER).stat(), os.fstat(descriptor))
    except OSError:
        return False


def _free(folder: Path) -> None:
    """Remove a folder whose owner is gone; one without an owner, or of another user, is left alone."""
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR)
    except OSError:
        return
    try:
        if _is_locked(descriptor):
            size = sum(item.stat().st_size for item in folder.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            _LOG.warning("freed %s: %.1f MiB of weights of a run that was killed", folder, size / 2**20)
    finally:
        os.close(descriptor)
