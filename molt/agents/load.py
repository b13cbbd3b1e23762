"""The agent file: --train.agent_path FILE.py is imported once and must export AgentRunner."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CellType
from typing import Any

from molt.agents.env import AgentRunner, Env
from molt.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAgent:
    """An agent file that was imported. Send its path, not this, to other processes."""

    path: Path
    runner: type[AgentRunner]
    digest: str
    """blake2b-128 hex over the file and every module beside it that it imports."""


def load_agent(path: str | Path) -> LoadedAgent:
    """Import an agent file; its folder is put on the import path, so that modules beside it can be imported."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SettingError(f"train.agent_path={path}, no such file; give a Python file that exports AgentRunner")
    if file.suffix != ".py":
        raise SettingError(f"train.agent_path={path}, not a Python file; give a file that ends in .py and exports AgentRunner")
    module_name = f"molt_agent_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None, f"no loader for {file}"
        module = importlib.util.module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # sys.exit() would end this process without a word
            del sys.modules[module_name]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            place = f" in line {lines[-1]}" if lines else ""
            raise SettingError(
                f"train.agent_path={path}, it cannot be imported ({type(error).__name__}: {error}{place}); mend the file"
            ) from error
    runner = getattr(module, "AgentRunner", None)
    if not (isinstance(runner, type) and issubclass(runner, AgentRunner)) or runner is AgentRunner:
        found = "exports no AgentRunner" if runner is None else f"exports AgentRunner={runner!r}"
        raise SettingError(f"train.agent_path={path}, it {found}; export `class AgentRunner(molt.agents.AgentRunner)`")
    unfinished = _unfinished(runner)
    if unfinished is not None:
        raise SettingError(f"train.agent_path={path}, {unfinished}")
    return LoadedAgent(path=file, runner=runner, digest=agent_digest(file))


def _unfinished(runner: type[AgentRunner]) -> str | None:
    """What an agent lacks, or what it does that nobody can await, in words; None when a rollout can begin."""
    env, makes_env = runner.env, runner.make_env is not AgentRunner.make_env
    if runner.run is AgentRunner.run and not makes_env:
        if env is None:
            return "its AgentRunner sets no env and overrides neither make_env nor run; do one of them"
        if not (isinstance(env, type) and issubclass(env, Env)):
            return f"its AgentRunner has env={env!r}; give a class derived from molt.agents.Env"
        if env.step is Env.step:
            return f"its {env.__name__} has no step; write `async def step(self, action)`"
    envs = [(env, ("reset", "step", "cut", "close"))] if isinstance(env, type) else []
    for kind, names in [(runner, ("start", "close", "run", "cut")), *envs]:
        for name in names:
            if not _is_async(getattr(kind, name)):
                return f"{kind.__name__}.{name} is not async; write `async def {name}`"
    return None


def _is_async(function: Any) -> bool:
    """Whether calling it gives something to await. Of a decorated function it is enough that what it wraps does."""
    inner = inspect.unwrap(function)
    held = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if cell != CellType()]
    return not inspect.isfunction(inner) or any(inspect.iscoroutinefunction(found) for found in (inner, *held))


def agent_digest(file: Path) -> str:
    """Digest over a file and, by their import statements, the modules of its folder that it needs."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(_sources(file)):
        data = source.read_bytes()
        digest.update(f"{source.relative_to(file.parent)}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _sources(file: Path) -> set[Path]:
    """The file and the modules of its folder that it imports, directly or through each other."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        source = waiting.pop()
        if source in found:
            continue
        found.add(source)
        for name in _imported_names(source):
            stem = file.parent.joinpath(*name.split("."))
            waiting += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return found


def _imported_names(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes(), filename=str(source))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
