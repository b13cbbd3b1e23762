"""Where the declaration folders lie: in a clone, an editable install or a wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

Folder = Literal["schemas", "stores", "pipelines", "queries", "examples", "recipes"]


def program_name(file: str | Path) -> str:
    """What a pipeline is called: its name in pipelines/, or the whole path of a copy."""
    path = Path(file).resolve()
    return path.stem if path.parent == folder("pipelines").resolve() else str(path)


@cache
def folder(name: Folder) -> Path:
    """The folder of that name: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    for place in (package / name, package.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name}: neither {package / name} nor {package.parent / name} is a folder; install molt-log again")
