"""The verbs runs, status and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from molt.cli.report import emit_json, emit_table
from molt.errors import SettingError
from molt.machine import TIERS, hardware, packages, version_of
from molt.runs import list_runs, run_place

Switch = Annotated[bool, Parameter(negative="")]


def mount(app: App) -> None:
    """Add the verbs."""
    app.command(status)
    app.command(runs)
    app.command(doctor)


def status(run: str, *, json: Switch = False) -> None:
    """Say where a run stands: attempts, steps, reward, versions and where its tokens went.

    Parameters
    ----------
    run
        Folder or name of the run.
    json
        Print JSON.
    """
    from molt.audit.status import run_status

    facts = run_status(run_place(run))
    if json:
        emit_json(facts)
    else:
        emit_table(("status", "value"), facts.items())


def runs(folder: Path = Path("runs"), *, json: Switch = False) -> None:
    """List the runs in a folder, oldest first.

    Parameters
    ----------
    folder
        Folder that holds the runs.
    json
        Print JSON.
    """
    if not folder.is_dir():
        raise SettingError(f"folder={folder}, no such folder; give the one that run.dir names")
    found: list[dict[str, Any]] = [
        {"run": run.name, "path": str(run.path), "attempts": run.num_attempts, "has_log": run.log.is_dir()} for run in list_runs(folder)
    ]
    if json:
        emit_json(found)
    else:
        emit_table(("run", "attempts", "log", "path"), [(run["run"], run["attempts"], run["has_log"], run["path"]) for run in found])


def doctor(*, json: Switch = False) -> int:
    """Say what this machine and environment have: install tiers, packages, hardware. Leaves with 1 when the reader tier is broken.

    Parameters
    ----------
    json
        Print JSON.
    """
    tiers = {tier: [name for name in names if version_of(name) is None] for tier, names in TIERS.items()}
    report = {
        "tiers": {tier: {"complete": not missing, "missing": missing} for tier, missing in tiers.items()},
        "wrong_packages": _wrong_packages(),
        "packages": packages(),
        "hardware": hardware(),
    }
    if json:
        emit_json(report)
    else:
        emit_table(("tier", "state"), [(tier, f"lacks {', '.join(missing)}" if missing else "complete") for tier, missing in tiers.items()])
        emit_table(("package", "version"), packages().items())
        emit_table(("machine", "value"), hardware().items())
        for line in report["wrong_packages"]:
            print(line)
    return 1 if tiers["reader"] or report["wrong_packages"] else 0


def _wrong_packages() -> list[str]:
    """Installed packages that stand in the way of the right one."""
    wrong = "PyPI package lance is another project and hides pylance; pip uninstall lance and install pylance"
    return [wrong] if version_of("lance") is not None else []
