"""Pipelines found by name and loaded from their file, as the programs that verbs run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from molt.errors import SettingError
from molt.places import folder
from molt.runs import RunDir


def program_path(name: str) -> Path:
    """File of a pipeline: a name in pipelines/ or the path of a copy."""
    path = Path(name) if name.endswith(".py") else folder("pipelines") / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder("pipelines").glob("*.py")))
        raise SettingError(f"pipeline={name}, no such file; take one of {known} or give the path of your copy")
    return path


def load_program(name: str) -> ModuleType:
    """The module of a pipeline, loaded once from its file."""
    path = program_path(name)
    module_name = f"molt_pipeline_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def recorded_programs(run: RunDir) -> list[str]:
    """The pipelines that made the attempts of a run, as its log names them, each once, the newest last."""
    from molt.log.reader import LogReader

    if not run.log.is_dir():
        return []
    rows = LogReader.open(run.path).cut().table("events", ["lsn", "body"], where="kind = 'attempt_started'").sort_by("lsn").to_pylist()
    named = [json.loads(row["body"]).get("pipeline") for row in rows]
    return [name for place, name in enumerate(named) if name and name not in named[place + 1 :]]


def load_registered(run: RunDir, agent: Path | None) -> None:
    """Load what registers estimators: the file given, and the copies of pipelines that made the run, as far as they are still there."""
    if agent is not None:
        from molt.algo.estimators import load_estimators

        if not agent.is_file():
            raise SettingError(f"agent={agent}, no such file; give the agent or pipeline file that registers an estimator")
        load_estimators(str(agent.resolve()))
    for name in recorded_programs(run):
        if name.endswith(".py") and Path(name).is_file():
            load_program(name)


def run_program(program: str, /, *arguments: Any, **named: Any) -> Any:
    """Call main of a pipeline, awaiting it when it is asynchronous; returns what it returns."""
    # Ray starts its processes by fork and exec at once, which does Lance no harm.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    main = getattr(load_program(program), "main", None)
    if not callable(main):
        raise SettingError(f"pipeline={program}, it has no function main; copy one from pipelines/ and edit it")
    try:
        inspect.signature(main).bind(*arguments, **named)
    except TypeError as error:
        raise SettingError(f"pipeline={program}, this verb does not run it: its main takes other arguments ({error})") from None
    result = main(*arguments, **named)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def run_quietly(program: str, /, *arguments: Any, is_quiet: bool, **named: Any) -> Any:
    """run_program; when is_quiet, what it prints goes to stderr, so that stdout holds one JSON document."""
    if not is_quiet:
        return run_program(program, *arguments, **named)
    with _stdout_on_stderr():
        return run_program(program, *arguments, **named)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """What this process prints, and what processes print that it starts meanwhile, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
