"""Writing evidence: the command, the versions, the figures."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import lance
import orjson
import pyarrow

from molt import __version__
from tools.device.parts import without_places

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "evidence"


def versions() -> dict[str, str]:
    """Versions that matter to the log."""
    return {
        "molt": __version__,
        "python": platform.python_version(),
        "pylance": lance.__version__,
        "pyarrow": pyarrow.__version__,
        "duckdb": duckdb.__version__,
    }


def keep(name: str, figures: dict[str, Any], *, claims: dict[str, bool]) -> Path:
    """Write docs/evidence/<name>.json; claims say what the figures were to show, and whether they did."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    record = {
        "command": "python -m " + " ".join([_module(), *without_places(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "machine": f"{platform.machine()}, {len(_cores())} cores, {platform.system()}",
        "claims": claims,
        "figures": figures,
    }
    path.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    return path


def _module() -> str:
    path = Path(sys.argv[0]).resolve()
    try:
        return ".".join(path.relative_to(FOLDER.parents[1]).with_suffix("").parts)
    except ValueError:
        return path.stem


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)
