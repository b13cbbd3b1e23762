"""The wheel carries the declaration folders as data inside the package, and works without the clone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from molt.environ import child

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "stores", "pipelines", "queries", "examples")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone, built here and unpacked."""
    where = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(where), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = where.glob("molt_log-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(where / "site")
    return where / "site"


def test_wheel_holds_every_declaration_and_no_top_level_package_but_molt(unpacked: Path) -> None:
    tops = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"molt"}
    for folder in FOLDERS:
        declared = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sql", ".toml")}
        carried = {path.relative_to(unpacked / "molt" / folder) for path in (unpacked / "molt" / folder).rglob("*") if path.is_file()}
        assert declared <= carried, folder


def test_wheel_works_without_the_clone(unpacked: Path, tmp_path: Path) -> None:
    code = (
        "import molt, molt.places, molt.schema, molt.audit.questions as q\n"
        f"assert molt.__file__.startswith({str(unpacked)!r}), molt.__file__\n"
        "print(len(molt.schema.tables()), len(q.load_questions()) > 10, molt.places.folder('stores'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=child(PYTHONPATH=str(unpacked)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "True", str(unpacked / "molt" / "stores")]
