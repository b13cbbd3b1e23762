"""From sums to measures with intervals: one row a variant, each beside the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt.ablate.measure import BY_ESTIMATOR, BY_GATE, BY_PAIR, BY_TRIPLE, COMMON, Sums, Tally

MEASURES = {
    "effective_share": "sampled tokens that are kept and have an advantage other than 0",
    "rejected_share": "trainable tokens that the gate rejected",
    "sample_share": "effective sample size of the weights over kept tokens: (sum w)^2 / (kept * sum w^2)",
    "advantage_mean": "mean advantage over trainable tokens",
    "advantage_std": "its deviation",
    "advantage_skew": "its skewness",
    "advantage_kurtosis": "its excess kurtosis",
    "signal_std": "deviation of weight * advantage over sampled tokens",
    "sign_agreement": "tokens on which variant and baseline both move, and in the same direction",
    "length_correlation": "correlation over rollouts of length and mean signal",
    "loss": "loss at step start, mean over steps",
    "moved_length_correlation": "correlation over rollouts of length and scale * |signal|: whether long rollouts move more",
}
"""Name of each measure and what it is."""
LEVEL = 0.95
"""Coverage of the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One measure of one variant; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None
    difference: float | None
    """Value minus the baseline's."""
    difference_low: float | None
    difference_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All measures of one variant."""

    variant: str
    estimator: str
    gate: str
    aggregation: str
    measures: dict[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An ablation of one run."""

    run: str
    lsn: int
    num_steps: int
    num_groups: int
    n_sampled: int
    num_resamples: int
    baseline: str
    rows: Sequence[Row]
    unavailable: dict[str, str]
    """Estimators that the log cannot feed, and why."""
    skipped: dict[int, str]
    """Recorded steps that could not be used, and why."""
    gradients: dict[str, Any] | None = field(default=None)
    """What a model added (molt.ablate.gradients)."""


def make_report(tally: Tally, *, run: str, lsn: int, skipped: dict[int, str], gradients: dict[str, Any] | None = None) -> Report:
    """Measures and their paired intervals. A variant whose estimator is unavailable has no row."""
    assert tally.sums is not None, "a tally of no steps has no report"
    values = measures(tally.sums, tally.num_steps)
    shape = (len(tally.grid.estimators), len(tally.grid.gates), len(tally.grid.aggregations))
    base = tally.grid.variants.index(tally.baseline)
    rows = []
    for place, variant in enumerate(tally.grid.variants):
        if variant.estimator in tally.unavailable:
            continue
        found = {name: _estimate(column.reshape(-1, np.prod(shape)), place, base) for name, column in values.items()}
        rows.append(
            Row(variant=variant.text, estimator=variant.estimator, gate=variant.gate, aggregation=variant.aggregation, measures=found)
        )
    return Report(
        run=run,
        lsn=lsn,
        num_steps=tally.num_steps,
        num_groups=tally.num_groups,
        n_sampled=tally.n_sampled,
        num_resamples=tally.num_resamples,
        baseline=tally.baseline.text,
        rows=rows,
        unavailable=tally.unavailable,
        skipped=skipped,
        gradients=gradients,
    )


def measures(sums: Sums, num_steps: int) -> dict[str, np.ndarray]:
    """Every measure for every resample and variant. # (B + 1, E, K, A) each"""
    common = {name: sums.common[:, i, None, None, None] for i, name in enumerate(COMMON)}
    gate = {name: sums.by_gate[:, None, :, None, i] for i, name in enumerate(BY_GATE)}
    estimator = {name: sums.by_estimator[:, :, None, None, i] for i, name in enumerate(BY_ESTIMATOR)}
    pair = {name: sums.by_pair[:, :, :, None, i] for i, name in enumerate(BY_PAIR)}
    triple = {name: sums.by_triple[..., i] for i, name in enumerate(BY_TRIPLE)}
    with np.errstate(divide="ignore", invalid="ignore"):
        n, rollouts, trainable = common["n"], common["num_rollouts"], common["n_trainable"]
        mean, variance, skew, kurtosis = _moments(*(estimator[name] / trainable for name in BY_ESTIMATOR))
        x_mean, x_var = common["x"] / rollouts, common["xx"] / rollouts - (common["x"] / rollouts) ** 2
        found = {
            "effective_share": pair["n_effective"] / n,
            "rejected_share": 1 - gate["n_kept"] / trainable,
            "sample_share": gate["w"] ** 2 / (gate["n_kept"] * gate["ww"]),
            "advantage_mean": mean,
            "advantage_std": np.sqrt(variance),
            "advantage_skew": skew,
            "advantage_kurtosis": kurtosis,
            "signal_std": np.sqrt(np.maximum(pair["ss"] / n - (pair["s"] / n) ** 2, 0)),
            "sign_agreement": pair["n_agree"] / (pair["n_agree"] + pair["n_differ"]),
            "length_correlation": _correlation(pair["y"] / rollouts, pair["yy"] / rollouts, pair["xy"] / rollouts, x_mean, x_var),
            "loss": triple["loss"] / (common["n_groups"] / sums.common[0, 0] * num_steps),
            "moved_length_correlation": _correlation(
                triple["z"] / rollouts, triple["zz"] / rollouts, triple["xz"] / rollouts, x_mean, x_var
            ),
        }
    assert list(found) == list(MEASURES), "every measure is described"
    shape = triple["loss"].shape
    return {name: np.broadcast_to(column, shape) for name, column in found.items()}


def _moments(m1: np.ndarray, m2: np.ndarray, m3: np.ndarray, m4: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, population variance, skewness, excess kurtosis from raw moments; the last two undefined without variance."""
    variance = np.maximum(m2 - m1**2, 0)
    safe = np.where(variance > 1e-12 * np.maximum(m2, 1e-300), variance, np.nan)
    skew = (m3 - 3 * m1 * m2 + 2 * m1**3) / safe**1.5
    kurtosis = (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / safe**2 - 3
    return m1, variance, skew, kurtosis


def _correlation(y: np.ndarray, yy: np.ndarray, xy: np.ndarray, x: np.ndarray, x_var: np.ndarray) -> np.ndarray:
    """Pearson correlation from means; undefined where either side is constant."""
    y_var = yy - y**2
    is_defined = (y_var > 1e-10 * np.maximum(yy, 1e-300)) & (x_var > 1e-10 * np.maximum(x**2, 1e-300))
    return np.where(is_defined, (xy - x * y) / np.sqrt(np.where(is_defined, x_var * y_var, 1)), np.nan)


def _estimate(column: np.ndarray, place: int, base: int) -> Estimate:
    own, difference = column[:, place], column[:, place] - column[:, base]
    low, high = _interval(own[1:])
    difference_low, difference_high = _interval(difference[1:])
    return Estimate(
        value=_number(own[0]),
        low=low,
        high=high,
        difference=_number(difference[0]),
        difference_low=difference_low,
        difference_high=difference_high,
    )


def _interval(resampled: np.ndarray) -> tuple[float | None, float | None]:
    """Percentile interval; None when fewer than half of the resamples are defined."""
    known = resampled[np.isfinite(resampled)]
    if len(known) == 0 or len(known) * 2 < len(resampled):
        return None, None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _number(value: np.floating[Any]) -> float | None:
    return float(value) if np.isfinite(value) else None
