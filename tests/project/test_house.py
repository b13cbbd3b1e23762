"""Rules of the house that no linter knows: sizes, names, one place for the environment, no bare tasks, no mocks, no pickles from disk."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for folder in ("molt", "pipelines", "examples", "tools") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def calls(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and dotted name of every call and attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            found.append((getattr(node, "lineno", 0), ast.unparse(node)))
    return found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name(path): ast.parse(path.read_text(encoding="utf-8")) for path in [*MODULES, *TESTS]}


def test_modules_stay_below_400_lines_and_functions_below_60(trees: dict[str, ast.Module]) -> None:
    too_long = []
    for path in MODULES:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > 400:
            too_long.append(f"{name(path)}: {num_lines} lines")
        for node in ast.walk(trees[name(path)]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > 60:
                too_long.append(f"{name(path)}:{node.lineno} {node.name}: {code_lines(node)} lines")
    assert too_long == []


def test_no_module_is_named_after_no_noun() -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base"}
    assert [name(path) for path in MODULES if path.stem in nameless] == []


def test_every_module_defers_its_annotations(trees: dict[str, ast.Module]) -> None:
    missing = []
    for path, tree in trees.items():
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        if not imports and any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign) for node in ast.walk(tree)):
            missing.append(path)
    assert missing == []


def test_environment_is_read_in_one_place(trees: dict[str, ast.Module]) -> None:
    found = [
        f"{path}:{line}"
        for path, tree in trees.items()
        if path.startswith(("molt/", "pipelines/")) and path != "molt/environ.py"
        for line, text in calls(tree)
        if text in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert found == []


def test_no_task_is_left_to_itself(trees: dict[str, ast.Module]) -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).rpartition(".")[0] in ("asyncio", "loop", "asyncio.get_running_loop()")
        and ast.unparse(node.value.func).rpartition(".")[2] in ("create_task", "ensure_future")
    ]
    assert found == []


def test_no_mocks(trees: dict[str, ast.Module]) -> None:
    found = [
        path
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("unittest"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("unittest") for alias in node.names))
    ]
    assert found == []


def test_nothing_is_unpickled_from_disk(trees: dict[str, ast.Module]) -> None:
    from_messages = {
        "molt/rollout/carried.py",  # what another process of this run made for a call over Ray
        "molt/rollout/vllm_weights.py",  # CUDA handles, which are tuples of bytes, from the trainer ranks of this run over Ray
        "tools/faults/spawn.py",  # what a test hands to the process that it is about to kill
    }
    found = []
    for path, tree in trees.items():
        if path.startswith("tests/") or path in from_messages:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("pickle.load", "pickle.loads", "dill.load", "joblib.load") or (
                called == "torch.load"
                and not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            ):
                found.append(f"{path}:{node.lineno} {called}")
    assert found == []


def test_remote_code_is_never_trusted(trees: dict[str, ast.Module]) -> None:
    found = [
        f"{path}:{node.value.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False"
    ]
    assert found == []
