"""The process behind a Verifier: reads arguments as JSON lines, calls one function, writes its results."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import orjson

_PR_SET_PDEATHSIG = 1


def main(file: str, name: str, memory_bytes: int, path: list[str]) -> None:
    """Serve until stdin ends. The caller kills this process when time is up, and the kernel when the caller is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a grader prints must not stand between the answers
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.path[:] = [*path, str(Path(file).parent)]
    spec = importlib.util.spec_from_file_location(f"molt_verifier_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name)
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        try:
            value = function(*orjson.loads(line))
            refuse_non_finite(value)
            data = orjson.dumps({"value": value})
        except Exception as error:
            data = orjson.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(data + b"\n")


def refuse_non_finite(value: Any) -> None:
    """ValueError for a number that is none, which JSON would turn into null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the grader returned {value}")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        refuse_non_finite(part)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), orjson.loads(sys.argv[4]))
