"""Made pages are current, and every promise names tests that are there."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/docs as a module."""
    loader = SourceFileLoader("molt_tools_docs", str(ROOT / "tools" / "docs"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["schema.md", "settings.md", "promises.md"])
def test_made_page_is_current(tool: ModuleType, name: str) -> None:
    path = ROOT / "docs" / name
    assert path.read_text(encoding="utf-8") == tool.pages()[path], "run tools/docs --write"


def test_every_promise_names_tests_that_are_there(tool: ModuleType) -> None:
    assert tool.missing_tests() == []
