"""The verb parity: how far engine and trainer are apart on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from molt import environ
from molt.cli.numbers import Count, Share
from molt.cli.programs import program_path, run_quietly
from molt.cli.report import emit_json, emit_table, note
from molt.hub import fetch_weights, with_fetched_models
from molt.machine import check_machine
from molt.settings import check, resolve

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
Switch = Annotated[bool, Parameter(negative="")]
SHOWN = ("mean", "p99", "max", "k3", "equal_share", "agreement_min", "agreement_mean", "limit_mean")


def mount(app: App) -> None:
    """Add the verb."""
    app.command(parity)


def parity(
    *flags: Settings,
    config: Files = (),
    variants: Words = (),
    limits: Words = (),
    agreement: Share = 0.9,
    prompts: Path | None = None,
    samples: Count = 4,
    pipeline: str = "parity",
    json: Switch = False,
) -> int:
    """Sample from a real engine, score the same ids as the trainer does, and compare log-probs and experts. Leaves with 1 past a limit.

    Settings are given as flags, --room.name VALUE; `molt settings` lists them. At least --actor.model_name_or_path is needed.

    Parameters
    ----------
    config
        TOML files with settings, laid over each other from left to right; flags are laid over them.
    variants
        dense, moe, moe+r3, fp8; what the model is when absent. fp8 quantizes the engine's weights and needs vLLM on a GPU.
    limits
        VARIANT=NATS: the largest mean of |trainer - engine| per token. In bfloat16 dense=0.06 moe=0.1 moe+r3=0.06 fp8=0.2 when absent;
        in float32 dense=1e-4 moe=1e-3 moe+r3=1e-4.
    agreement
        The smallest share of experts, in any layer, on which both sides must agree.
    prompts
        Prompts in the form of data.prompt_dataset; fixed ones when absent.
    samples
        Answers to each prompt, of rollout.max_new_tokens each.
    pipeline
        Program in pipelines/, or the path of your copy of one.
    json
        Print JSON.
    """
    given = resolve(config, flags)
    resolved = with_fetched_models(given, say=note)
    check(resolved)
    program_path(pipeline)
    check_machine(resolved)
    fetch_weights(given, resolved, say=note)
    environ.prepare()
    found = run_quietly(
        pipeline,
        resolved,
        variants=variants,
        given_limits=limits,
        agreement=agreement,
        prompts=prompts,
        num_samples=samples,
        is_quiet=json,
    )
    if json:
        emit_json(found)
    else:
        _print(found)
    return 0 if found["is_within"] else 1


def _print(found: dict[str, Any]) -> None:
    """The table, and the verdict in one line each."""
    rows = [
        (row["variant"], row["num_tokens"], *(_text(row[name]) for name in SHOWN), "yes" if row["is_within"] else "NO")
        for row in found["rows"]
    ]
    columns = ("variant", "tokens", *(name.replace("_", " ") for name in SHOWN), "within")
    emit_table(columns, rows, title=f"engine {found['engine']} and trainer, {found['dtype']}, {found['model']}")
    for row in found["rows"]:
        print(f"{row['variant']}: ratio quantiles " + ", ".join(f"{level} {value:.4f}" for level, value in row["ratios"].items()))


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
