"""Versions that clean-up must keep: those that a pin names, and those that a live reader has open."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Mapping
from typing import Any

from molt.errors import CorruptLogError, LogFullError
from molt.log.checked import decode, encode
from molt.log.home import Home

READERS, PINS = "readers/", "pins/"
HOLD_LIMIT_S = 6 * 3600.0
"""Longest hold of a reader on another host, whose death cannot be seen."""


def hold(home: Home, versions: Mapping[str, int], owner: Any) -> None:
    """Keep those versions readable until the owner is collected or this process is gone."""
    name = f"{READERS}{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.json"
    content = {"versions": dict(versions), "pid": os.getpid(), "host": socket.gethostname(), "until": time.time() + HOLD_LIMIT_S}
    try:
        home.write(name, encode(content))
    except LogFullError:
        return  # a log that cannot be written to is not cleaned up either
    weakref.finalize(owner, home.delete, name)


def _is_alive(fields: Mapping[str, Any]) -> bool:
    if fields["until"] < time.time():
        return False
    if fields["host"] != socket.gethostname():
        return True
    try:
        os.kill(int(fields["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def held_versions(home: Home, table: str) -> set[int]:
    """Versions of a table that a pin or a live reader needs; holds of dead readers are removed."""
    return set(holders(home, table).values())


def holders(home: Home, table: str) -> dict[str, int]:
    """The version of a table that each pin and each live reader needs, by the name of its file; holds of dead readers are removed."""
    needed: dict[str, int] = {}
    for prefix in (PINS, READERS):
        for name in home.names(prefix):
            content = home.read(name)
            if content is None:
                continue
            try:
                fields = decode(content, name)
                versions = fields["versions"]
            except (CorruptLogError, KeyError) as error:
                if prefix == PINS:
                    raise CorruptLogError(f"{name} is damaged, so what it keeps is unknown; delete it or restore it") from error
                continue
            if prefix == READERS and not _is_alive(fields):
                home.delete(name)
            elif table in versions:
                needed[name] = int(versions[table])
    return needed
