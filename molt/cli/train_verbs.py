"""The verbs train, replay, demo and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from molt import environ
from molt.cli.numbers import Count
from molt.cli.preflight import try_everything
from molt.cli.programs import load_program, load_registered, recorded_programs, run_quietly
from molt.cli.report import emit_json, emit_table, note
from molt.config import Config
from molt.errors import SettingError
from molt.hub import fetch_weights, with_fetched_models
from molt.log.store import load_store
from molt.machine import check_machine, machine_findings
from molt.runs import RunDir, free_place, named, open_run
from molt.settings import check, config_digest, dump_toml, flatten, resolve, with_whole_paths
from molt.settings_docs import describe
from molt.settings_rules import check_inputs

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")]
Switch = Annotated[bool, Parameter(negative="")]


def mount(app: App) -> None:
    """Add the verbs."""
    app.command(train)
    app.command(replay)
    app.command(demo)
    app.command(settings)


def train(
    *flags: Settings,
    config: Files = (),
    resume: Path | None = None,
    pipeline: str | None = None,
    dry_run: Switch = False,
    json: Switch = False,
) -> int | None:
    """Train a policy: agents roll out into the log, the trainer learns from the log, weights flow back.

    Settings are given as flags, --room.name VALUE; `molt settings` lists them.

    Parameters
    ----------
    config
        TOML files with settings, laid over each other from left to right; flags are laid over them.
    resume
        Go on with a run: the newest checkpoint and the log.
    pipeline
        Program in pipelines/, or the path of your copy of one. When absent rl, or with --resume the one that made the run.
    dry_run
        Check everything that needs no GPU and print the resolved settings; write nothing.
    json
        Print JSON.
    """
    run, resolved = resolved_for(config, flags, resume)
    pipeline = pipeline or made_by(run) or "rl"
    given, resolved = resolved, with_fetched_models(resolved, say=note)
    check(resolved)
    check_place(resolved, run)
    check_inputs(resolved)
    load_program(pipeline)  # what it registers is known from here on
    found = try_everything(resolved)
    resolved = with_whole_paths(resolved)
    if dry_run:
        _print_dry_run(resolved, found, as_json=json)
        return None
    check_machine(resolved)
    fetch_weights(given, resolved, say=note)
    environ.prepare()
    return run_and_say(pipeline, resolved, run, as_json=json)


def replay(
    run: Path,
    *,
    steps: Count | None = None,
    agent: Path | None = None,
    json: Switch = False,
) -> int | None:
    """Feed the recorded plans and rows through the same trainer code; stop at the first difference and name it.

    Parameters
    ----------
    run
        Folder or name of the run.
    steps
        Steps to replay; all when absent.
    agent
        Agent or pipeline file that registers an estimator of the run, where its own are no longer in their place.
    json
        Print JSON.
    """
    environ.prepare()
    found = open_run(run)
    load_registered(found, agent)
    report = run_quietly("replay", found, steps=steps, is_quiet=json)
    if json:
        emit_json(report if isinstance(report, dict) else {"result": report})
    elif isinstance(report, dict):
        emit_table(("replay", "value"), report.items())
    return report if isinstance(report, int) else None


def demo(*flags: Settings, runs: str = "runs", name: str | None = None, json: Switch = False) -> None:
    """Make a tiny model and a task with a tool, train it with GRPO through Ray, the log and FSDP2, and audit the run.

    Parameters
    ----------
    runs
        Folder that holds the runs.
    name
        Name of the run; made when absent.
    json
        Print JSON.
    """
    environ.prepare()
    seen = run_quietly("demo", runs=runs, name=name, flags=flags, is_quiet=json)
    if json:
        emit_json(seen)


def settings(*, changed_by: Files = (), json: Switch = False) -> None:
    """List every setting: name, type, default and meaning.

    Parameters
    ----------
    changed_by
        TOML files whose values are shown in place of the defaults.
    json
        Print JSON.
    """
    values = flatten(resolve(changed_by))
    rows = [(entry.key, entry.kind, values[entry.key], entry.meaning) for entry in describe()]
    if json:
        emit_json([{"key": key, "type": kind, "value": value, "meaning": meaning} for key, kind, value, meaning in rows])
    else:
        emit_table(("setting", "type", "value", "meaning"), rows)


def run_and_say(pipeline: str, config: Config, run: RunDir | None, *, as_json: bool) -> int:
    """Run a pipeline that trains, say where its run lies, and return its exit code."""
    config = named(config)
    path = run.path if run is not None else Path(config.run.dir).absolute() / (config.run.name or "")
    result = run_quietly(pipeline, config, resume=run, is_quiet=as_json)
    code = result if isinstance(result, int) else 0
    if as_json:
        emit_json({"run": str(path), "exit_code": code})
    else:
        print(f"run: {path}")
    return code


def check_place(config: Config, run: RunDir | None) -> None:
    """Refuse a name that is used or no name of a folder, and a log profile that is not there, before anything is started."""
    load_store(config.log.store)
    if run is None and config.run.name is not None:
        free_place(config)


def made_by(run: RunDir | None) -> str | None:
    """The pipeline that made the newest attempt of a run. SettingError where it was a copy that is gone."""
    names = [] if run is None else recorded_programs(run)
    if names and names[-1].endswith(".py") and not Path(names[-1]).is_file():
        raise SettingError(f"pipeline is absent and {names[-1]}, which made the run, is not there; give --pipeline FILE, where it is now")
    return names[-1] if names else None


def resolved_for(files: tuple[Path, ...], flags: tuple[str, ...], resume: Path | None) -> tuple[RunDir | None, Config]:
    """The run to go on with, if any, and the settings in force."""
    if resume is None:
        return None, resolve(files, flags)
    if files:
        raise SettingError(f"config={files[0]} with resume={resume}, a run goes on with its own settings; give what changes as flags")
    run = open_run(resume)
    return run, run.config(flags)


def _print_dry_run(config: Config, found: dict[str, Any], *, as_json: bool) -> None:
    """The resolved settings, their digest, what the prompts hold, and what this machine lacks for them."""
    lacking = list(machine_findings(config))
    if as_json:
        emit_json({"config": config.model_dump(mode="json"), "config_digest": config_digest(config), "data": found, "lacking": lacking})
        return
    print(dump_toml(config))
    note(f"data: {', '.join(f'{name} {value}' for name, value in found.items() if value is not None)}")
    for line in lacking:
        note(f"this machine lacks: {line}")
    note(f"settings are in order, config_digest={config_digest(config)}; nothing was written")
