"""The agent file: --train.agent_path FILE.py is imported once and must export AgentRunner."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from molt.agents.env import AgentRunner
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
        except Exception as error:
            del sys.modules[module_name]
            raise SettingError(
                f"train.agent_path={path}, it cannot be imported ({type(error).__name__}: {error}); mend the file"
            ) from error
    runner = getattr(module, "AgentRunner", None)
    if not (isinstance(runner, type) and issubclass(runner, AgentRunner)) or runner is AgentRunner:
        found = "exports no AgentRunner" if runner is None else f"exports AgentRunner={runner!r}"
        raise SettingError(f"train.agent_path={path}, it {found}; export `class AgentRunner(molt.agents.AgentRunner)`")
    return LoadedAgent(path=file, runner=runner, digest=agent_digest(file))


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
