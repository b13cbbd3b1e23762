"""The verb sft: supervised fine-tuning on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from molt import environ
from molt.cli.programs import load_program, program_path
from molt.cli.report import emit_json, emit_table, note
from molt.cli.train_verbs import check_place, made_by, resolved_for, run_and_say
from molt.config import Config
from molt.hub import fetch_weights, with_fetched_models
from molt.machine import check_machine
from molt.settings import check, config_digest, flatten, with_whole_paths
from molt.settings_rules import check_output, check_supervised

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
    pipeline: str | None = None,
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
        Program in pipelines/, or the path of your copy of one. When absent sft, or with --resume the one that made the run.
    dry_run
        Check the settings and print them; write nothing.
    json
        Print JSON.
    """
    run, resolved = resolved_for(config, flags, resume)
    pipeline = pipeline or made_by(run) or "sft"
    given, resolved = resolved, with_fetched_models(resolved, say=note)
    check_supervised(resolved)
    # Nothing is generated, so the length of a model call says nothing about the data.
    check(resolved.model_copy(update={"rollout": resolved.rollout.model_copy(update={"max_new_tokens": 1})}))
    check_output(resolved)
    check_place(resolved, run)
    resolved = with_whole_paths(resolved)
    program_path(pipeline)
    if dry_run:
        _print_dry_run(resolved, pipeline, as_json=json)
        return None
    check_machine(resolved)
    fetch_weights(given, resolved, say=note)
    environ.prepare()
    return run_and_say(pipeline, resolved, run, as_json=json)


def _print_dry_run(config: Config, pipeline: str, *, as_json: bool) -> None:
    """Read the conversations from end to end, and print what would be trained under which settings."""
    train, held_out, num_steps = load_program(pipeline).load(config)
    data = {"num_conversations": len(train), "num_held_out": 0 if held_out is None else len(held_out), "num_steps": num_steps}
    values = flatten(config)
    if as_json:
        emit_json({"settings": values, "config_digest": config_digest(config), "data": data | {"digest": train.digest}})
    else:
        emit_table(("setting", "value"), [*((key, value) for key, value in values.items() if value is not None), *data.items()])
