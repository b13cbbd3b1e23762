"""Distances between the log-probs of an engine and of a trainer on the tokens that the engine sampled.

Axes: N sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
"""Of the ratio exp(trainer - engine)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Over all sampled tokens, with d = trainer - engine in nats."""

    num_tokens: int
    mean: float
    """Of |d|."""
    p99: float
    max: float
    k3: float
    """Mean of exp(d) - 1 - d: divergence of the engine's distribution from the trainer's (Schulman 2020)."""
    equal_share: float
    """Tokens whose float32 log-probs are equal bit for bit."""
    ratios: dict[str, float]
    """Quantiles of exp(d) by probability."""


def measure_gap(engine_N: np.ndarray, trainer_N: np.ndarray) -> Gap:
    """The distance of float32 log-probs. One that is not a number makes every figure so, and no limit holds."""
    assert len(engine_N) == len(trainer_N) > 0, "one log-prob of each side for each token, and at least one token"
    difference_N = trainer_N.astype(np.float64) - engine_N.astype(np.float64)
    size_N = np.abs(difference_N)
    ratio_N = np.exp(difference_N)
    is_equal_N = engine_N.astype(np.float32).view(np.int32) == trainer_N.astype(np.float32).view(np.int32)
    return Gap(
        num_tokens=len(difference_N),
        mean=float(size_N.mean()),
        p99=float(np.quantile(size_N, 0.99)),
        max=float(size_N.max()),
        k3=float((ratio_N - 1 - difference_N).mean()),
        equal_share=float(is_equal_N.mean()),
        ratios={f"{level:g}": float(value) for level, value in zip(QUANTILES, np.quantile(ratio_N, QUANTILES), strict=True)},
    )
