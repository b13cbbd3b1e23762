"""Ablate a run: any estimators, gates and aggregations on the batches that its log holds, without generating or training anything.

Copy this file and edit it: `molt ablate RUN --pipeline my_ablate.py` runs the copy.

    log --> scored steps, one at a time --> sums per group (two threads) --> measures with paired intervals --> table, JSON, plot
                                        '-> with a model: the gradient of each variant on the same batches
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from molt.ablate.measure import StepSums, Tally
from molt.ablate.place import Place
from molt.ablate.record import ScoredRun
from molt.ablate.report import Report, make_report
from molt.ablate.variants import baseline_of, parse_grid
from molt.errors import DataError
from molt.runs import RunDir


def main(
    run: RunDir,
    *,
    at: Place,
    estimators: Sequence[str],
    corrections: Sequence[str],
    bands: Sequence[str],
    aggregations: Sequence[str],
    baseline: str | None,
    num_resamples: int,
    seed: int,
    model: str | None = None,
    num_model_steps: int = 4,
    num_threads: int = 2,
) -> Report:
    """Try the grid on every scored step at a place of its log. Raises DataError when the log holds none that can be used."""
    record = ScoredRun.open(run.path, at=at)
    grid = parse_grid(estimators or [record.config.algo.advantage.estimator], corrections, bands, aggregations)
    tally = Tally(grid=grid, config=record.config, baseline=baseline_of(grid, baseline), num_resamples=num_resamples, seed=seed)
    for found in measured(tally, record, num_threads=num_threads):
        tally.take(found)
    skipped = {step.step: step.reason for step in record.skipped}
    if tally.num_steps == 0:
        why = next(iter(skipped.values()), "no step was scored")
        raise DataError(f"run={run.name}: no step can be ablated, {why}; train at least one step first")
    gradients = None
    if model is not None:
        from molt.ablate.gradients import compare_gradients

        gradients = compare_gradients(record, grid, tally.baseline, model=model, num_steps=num_model_steps)
    return make_report(tally, run=run.name, lsn=record.cut.lsn, skipped=skipped, gradients=gradients)


def measured(tally: Tally, record: ScoredRun, *, num_threads: int) -> Iterator[StepSums]:
    """The sums of each step in order; at most num_threads + 1 batches are in memory."""
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    waiting: deque[Future[StepSums]] = deque()
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ablate") as pool:
            for step in record.steps():
                waiting.append(pool.submit(tally.measure, step))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(was)
