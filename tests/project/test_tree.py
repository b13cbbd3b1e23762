"""README's tree equals the disk: one line per file, each with the caption that the file gives itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/tree as a module."""
    loader = SourceFileLoader("molt_tools_tree", str(ROOT / "tools" / "tree"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_clone() -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode != 0:
        pytest.skip("the tree is compared in a clone")


def test_tree_in_the_readme_equals_the_disk(tool: ModuleType) -> None:
    assert tool.difference() == [], "run tools/tree --write"


def test_every_file_says_what_it_is(tool: ModuleType) -> None:
    silent = [name for name in tool.tracked() if not tool.caption(name) and Path(name).suffix in (".py", ".sql", ".md", ".toml", ".sh")]
    assert silent == []


def test_tool_leaves_with_1_at_a_difference(tool: ModuleType, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "tree")], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == (1 if tool.difference() else 0)
