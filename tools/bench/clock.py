"""Times of small pieces of work on a machine that others use too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def quick_of(taken: list[float]) -> float:
    """Lower quartile: what the work takes when nothing else wants the core."""
    return float(np.quantile(taken, 0.25))


def quick_times(works: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """Lower quartile of each work, all of them in turn; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: quick_of(taken[1:]) for name, taken in times.items()}
