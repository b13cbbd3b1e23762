"""The verbs ablate and simulate: what other algorithms or bounds would have done with the batches of a recorded run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from molt.cli.numbers import Count, Natural
from molt.cli.programs import load_registered, run_program
from molt.cli.report import emit_json, emit_table
from molt.errors import SettingError
from molt.runs import open_run

if TYPE_CHECKING:
    from molt.ablate.place import Place
    from molt.ablate.report import Report

Switch = Annotated[bool, Parameter(negative="")]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
SHOWN = ("effective_share", "rejected_share", "sample_share", "advantage_std", "signal_std", "sign_agreement", "length_correlation")


def mount(app: App) -> None:
    """Add the verbs."""
    app.command(ablate)
    app.command(simulate)


def ablate(
    run: str,
    *,
    estimators: Words = (),
    corrections: Words = ("off",),
    bands: Words = (),
    aggregations: Words = ("token-mean",),
    baseline: str | None = None,
    num_resamples: Natural = 400,
    seed: Natural = 0,
    agent: Path | None = None,
    model: str | None = None,
    model_steps: Count = 4,
    plot: Path | None = None,
    recompute: Switch = False,
    pipeline: str = "ablate",
    json: Switch = False,
) -> int:
    """Try estimators, gates and aggregations on the recorded batches of a run: no rollouts, no GPU. Every number has a paired interval.

    Parameters
    ----------
    run
        Folder or name of the run; RUN@LSN and RUN@PIN read its log as it was.
    estimators
        Estimators, as name or name:gamma=0.99,lambd=0.95,whiten=false; the run's own when absent.
    corrections
        Gates: off, or [decoupled/][kl/|tv/]level/mode[/low:high], such as token/mask or geo/clip/0.9:1.1.
    bands
        Bands low:high, each tried with every gate that names none.
    aggregations
        token-mean, seq-mean-token-mean, prompt-mean-token-mean.
    baseline
        Variant that others are compared with, estimator+gate+aggregation; the first when absent.
    num_resamples
        Resamples of the bootstrap over groups.
    seed
        Seed of the bootstrap.
    agent
        Agent or pipeline file that registers estimators of its own.
    model
        Folder of a model: adds the gradient of each variant, its cosine to the baseline's and its noise.
    model_steps
        Newest steps that the model is asked about.
    plot
        File for an SVG plot.
    recompute
        Instead: compute advantages, gates and losses again as the run did and compare them bit for bit. Leaves with 1 at a difference.
    pipeline
        Name in pipelines/, or the path of your copy.
    json
        Print JSON.
    """
    if plot is not None and not plot.absolute().parent.is_dir():
        raise SettingError(f"plot={plot}, its folder is not there; make it, or give another file")
    if bands and all(correction == "off" for correction in corrections):
        raise SettingError(f"bands={' '.join(bands)}, no gate is tried that takes one; give --corrections token/mask or another")
    where, at = split_place(run)
    load_registered(open_run(where), agent)
    if recompute:
        return _recompute(where, at, as_json=json)
    from molt.ablate.plot import write_plot

    report: Report = run_program(
        pipeline,
        open_run(where),
        at=at,
        estimators=estimators,
        corrections=corrections,
        bands=bands,
        aggregations=aggregations,
        baseline=baseline,
        num_resamples=num_resamples,
        seed=seed,
        model=model,
        num_model_steps=model_steps,
    )
    if plot is not None:
        write_plot(report, plot)
    if json:
        emit_json(asdict(report))
    else:
        _print(report, plot)
    return 0


def simulate(
    run: str,
    *,
    max_lag: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="")] = (),
    queue: int | None = None,
    filter_range: tuple[float, float] | None = None,
    pacing: str = "paced",
    json: Switch = False,
) -> None:
    """Ask what another bound on staleness, or another filter, would have kept of a run's rollouts, from their recorded timing.

    Parameters
    ----------
    run
        Folder or name of the run; RUN@LSN and RUN@PIN read its log as it was.
    max_lag
        Bounds to try, in policy versions; the run's own when absent.
    queue
        Versions that generation may run ahead; the bound that is tried when absent.
    filter_range
        Keep groups whose mean outcome lies strictly inside; the run's own when absent.
    pacing
        paced: prompts are sent as the bound allows, rollouts take as long as they took. recorded: rollouts arrive when they did.
    json
        Print JSON.
    """
    from molt.simulate.run import simulate_run

    if filter_range is not None and not filter_range[0] < filter_range[1]:
        raise SettingError(f"filter_range={filter_range[0]:g} {filter_range[1]:g}, nothing lies inside; give the smaller number first")
    where, at = split_place(run)
    found = [
        asdict(item)
        for item in simulate_run(open_run(where).path, at=at, max_lags=max_lag, queue=queue, filter_range=filter_range, pacing=pacing)
    ]
    if json:
        emit_json(found)
    else:
        emit_table(
            ("bound", *(str(item["max_lag"]) for item in found)),
            [(key, *(item[key] for item in found)) for key in found[0] if key != "max_lag"],
        )


def split_place(run: str) -> tuple[str, Place]:
    """Run and place of RUN, RUN@LSN or RUN@PIN; an existing path that holds an @ is a run."""
    where, found, at = run.rpartition("@")
    if not found or not at or Path(run).exists():
        return run, None
    return where, int(at) if at.isdigit() else at


def _recompute(where: str, at: Place, *, as_json: bool) -> int:
    from molt.ablate.recompute import compare_run
    from molt.ablate.record import ScoredRun

    record = ScoredRun.open(open_run(where).path, at=at)
    found = compare_run(record)
    if as_json:
        skipped = [asdict(step) for step in record.skipped]
        emit_json({"is_equal": all(step.is_equal for step in found), "steps": [asdict(step) for step in found], "skipped": skipped})
    else:
        columns = ("step", "sampled tokens", "advantages that differ", "weights that differ", "loss digest")
        words = {True: "equal", False: "differs", None: "cannot be told"}
        emit_table(columns, [(s.step, s.n_sampled, s.n_advantages_differ, s.n_weights_differ, words[s.is_loss_equal]) for s in found])
        print(f"recompute: {sum(step.is_equal for step in found)} of {len(found)} steps equal bit for bit, {len(record.skipped)} skipped")
    return 0 if all(step.is_equal for step in found) else 1


def _print(report: Report, plot: Path | None) -> None:
    rows = []
    for row in report.rows:
        cells = [row.measures[name] for name in SHOWN]
        texts = ["" if c.value is None else f"{c.value:.3f}" + ("" if c.low is None else f" [{c.low:.3f}, {c.high:.3f}]") for c in cells]
        rows.append((f"{row.variant} (baseline)" if row.variant == report.baseline else row.variant, *texts))
    emit_table(("variant", *(name.replace("_", " ") for name in SHOWN)), rows, title=f"{report.run} up to lsn {report.lsn}")
    if report.gradients is not None:
        found = report.gradients["variants"]
        emit_table(
            ("variant", "cosine", "norm", "noise"),
            [(name, *(item[k] for k in ("cosine", "norm", "noise"))) for name, item in found.items()],
        )
    for name, why in report.unavailable.items():
        print(f"not tried: {name}, {why}")
    for step, why in report.skipped.items():
        print(f"skipped: step {step}, {why}")
    print(
        f"ablate: {report.num_steps} steps, {report.num_groups} groups, {report.n_sampled} sampled tokens, {report.num_resamples} resamples"
    )
    if plot is not None:
        print(f"plot: {plot}")
