"""Two-sample tests: whether what was kept differs from what was lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """One figure of kept and of lost groups."""

    mean_kept: float | None
    mean_lost: float | None
    p_value: float | None
    """Chance of a difference at least this large if both came from one source; None with fewer than two on either side."""


def distribution_bias(kept: Sequence[float], lost: Sequence[float]) -> Bias:
    """Kolmogorov-Smirnov: any difference between the two distributions."""
    p_value = ks_p_value(kept, lost) if min(len(kept), len(lost)) >= 2 else None
    return Bias(mean_kept=_mean(kept), mean_lost=_mean(lost), p_value=p_value)


def mean_bias(kept: Sequence[float], lost: Sequence[float]) -> Bias:
    """Welch's z: a difference of means, for figures with few distinct values."""
    p_value = welch_p_value(kept, lost) if min(len(kept), len(lost)) >= 2 else None
    return Bias(mean_kept=_mean(kept), mean_lost=_mean(lost), p_value=p_value)


def ks_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """P(D >= observed) by the asymptotic distribution with Stephens' correction for small samples."""
    x, y = np.sort(np.asarray(a, np.float64)), np.sort(np.asarray(b, np.float64))
    both = np.concatenate([x, y])
    distance = np.abs(np.searchsorted(x, both, "right") / len(x) - np.searchsorted(y, both, "right") / len(y)).max()
    root = math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    z = (root + 0.12 + 0.11 / root) * distance
    if z < 0.2:
        return 1.0
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * k * k * z * z) for k in range(1, 101)]
    return min(1.0, max(0.0, math.fsum(terms)))


def welch_p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided, by the normal distribution; 1 when neither side varies and the means agree, 0 when they do not."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    spread = x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)
    difference = abs(x.mean() - y.mean())
    if spread == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(difference / math.sqrt(2 * spread))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
