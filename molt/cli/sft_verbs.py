"""The verb sft: supervised fine-tuning on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from molt import environ
from molt.cli.programs import program_path, run_program
from molt.cli.report import emit_json, emit_table
from molt.machine import check_machine
from molt.runs import open_run
from molt.settings import check, config_digest, flatten, resolve

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")]
Switch = Annotated[bool, Parameter(negative="")]


def mount(app: App) -> None:
    """Add the verb."""
    app.command(sft)


def sft(
    *flags: Settings,
    config: Files = (),
    resume: Path | None = None,
    pipeline: str = "sft",
    dry_run: Switch = False,
    json: Switch = False,
) -> int | None:
    """Learn the assistant turns of conversations; every row that is learned is in the log.

    Settings are given as flags, --room.name VALUE; `molt settings` lists them.

    Parameters
    ----------
    config
        TOML files with settings, laid over each other from left to right; flags are laid over them.
    resume
        Go on with a run from its newest checkpoint.
    pipeline
        Program in pipelines/, or the path of your copy of one.
    dry_run
        Check the settings and print them; write nothing.
    json
        Print JSON.
    """
    run = None if resume is None else open_run(resume)
    resolved = resolve(config, flags) if run is None else run.config(flags)
    check(resolved)
    program_path(pipeline)
    if dry_run:
        values = flatten(resolved)
        if json:
            emit_json({"settings": values, "config_digest": config_digest(resolved)})
        else:
            emit_table(("setting", "value"), [(key, value) for key, value in values.items() if value is not None])
        return None
    check_machine(resolved)
    environ.prepare()
    result = run_program(pipeline, resolved, resume=run)
    return result if isinstance(result, int) else None
