"""The verb plan: does a run fit a cluster that is only described?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from molt.cli.numbers import Count, Size
from molt.cli.report import emit_json, emit_table, note
from molt.errors import SettingError
from molt.fit import Cluster, Fit, fit
from molt.hub import with_fetched_models
from molt.model_shape import ModelShape
from molt.settings import resolve

Settings = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")]


def mount(app: App) -> None:
    """Add the verb."""
    app.command(plan)


def plan(
    *flags: Settings,
    gpus: Count,
    gpu_memory_gib: Size = 80.0,
    host_memory_gib: Size | None = None,
    gpus_per_host: Count = 8,
    config: Files = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check shapes, divisibility, memory and places of a run for a cluster, from settings and a model's config.json. Needs no GPU.

    Settings are given as for `molt train`. The model's folder may hold a config.json alone. Exit code 0 when it fits, 1 when it does not.

    Parameters
    ----------
    gpus
        GPUs of the cluster.
    gpu_memory_gib
        Memory of each.
    host_memory_gib
        Memory of each host; not looked at when absent.
    gpus_per_host
        GPUs of each host.
    config
        TOML files with settings, laid over each other from left to right; flags are laid over them.
    json
        Print JSON.
    """
    resolved = with_fetched_models(resolve(config, flags), say=note)
    folder = resolved.actor.model_name_or_path
    if folder is None:
        raise SettingError("actor.model_name_or_path is not given; give --actor.model_name_or_path FOLDER with a config.json")
    shape = ModelShape.read(folder)
    from molt.learn.meta import count_parameters

    parameters = count_parameters(folder)
    cluster = Cluster(num_gpus=gpus, gpu_gib=gpu_memory_gib, host_gib=host_memory_gib, gpus_per_host=gpus_per_host)
    found = fit(resolved, cluster, shape, parameters)
    if json:
        emit_json(
            {
                "fits": found.is_fitting,
                "cluster": asdict(cluster),
                "shape": asdict(shape),
                "parameters": asdict(parameters),
                **asdict(found),
            }
        )
    else:
        _print(found, shape, parameters.total)
    return 0 if found.is_fitting else 1


def _print(found: Fit, shape: ModelShape, total: int) -> None:
    """Bills as one table, then what stands against it."""
    experts = f", {shape.num_experts} experts, {shape.num_experts_per_token} a token" if shape.num_experts else ""
    note(f"{shape.model_type}: {total / 1e9:.2f} x 10^9 parameters, {shape.num_layers} layers{experts}")
    if found.layout is not None:
        kind = "side by side" if found.layout.is_colocated else "apart"
        note(f"places: {len(found.layout.ranks)} ranks and {len(found.layout.engines)} engines {kind} on {sum(found.layout.bundles)} GPUs")
    bills = {"trainer": found.trainer, "engine": found.engine, "host": found.host}
    rows = [(place, need.what, f"{need.gib:.2f}", need.why) for place, bill in bills.items() for need in bill.needs]
    rows += [
        (place, "left", f"{left:.2f}", "shared with the other" if _is_shared(found) and place != "host" else "")
        for place, left in found.free_gib.items()
    ]
    emit_table(("where", "what", "GiB", "why"), rows)
    note(f"an engine's cache holds {found.sequences:.1f} sequences of the longest kind")
    for line in found.notes:
        note(line)
    for line in found.findings:
        note(f"does not fit: {line}")
    if found.is_fitting:
        note("it fits")


def _is_shared(found: Fit) -> bool:
    return found.layout is not None and found.layout.is_colocated
