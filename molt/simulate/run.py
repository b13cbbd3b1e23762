"""Bounds and filters tried on one run, each with what it keeps, what it loses, whom it loses and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from molt.ablate.place import Place
from molt.admission.decide import Decision
from molt.errors import SettingError
from molt.simulate.bias import Bias, distribution_bias, mean_bias
from molt.simulate.history import History, PastGroup, read_history
from molt.simulate.paced import play_paced
from molt.simulate.play import Outcome, count_fates, play_recorded

PACINGS = ("paced", "recorded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one bound would have done. Tokens are sampled tokens; shares are of the tokens that were decided on."""

    max_lag: int
    queue: int
    """Versions that generation may run ahead."""
    pacing: str
    num_groups: int
    """Groups in the record that finished."""
    num_steps: int
    n_kept: int
    n_stale: int
    n_filtered: int
    n_incomplete: int
    """Tokens of groups that lost members; those of failed groups are none."""
    n_open: int
    """Tokens of groups that no step came to decide on."""
    kept_share: float | None
    lag_mean: float | None
    """Over trained groups, in versions."""
    lag_max: int | None
    wait_s: float
    wait_share: float | None
    """Of the elapsed time."""
    elapsed_s: float
    length_kept: float | None
    """Mean sampled tokens per rollout over kept groups."""
    length_lost: float | None
    length_p: float | None
    """Two-sample test that kept and lost groups have one distribution of lengths."""
    reward_kept: float | None
    reward_lost: float | None
    reward_p: float | None
    """Two-sample test that kept and lost groups have one mean reward."""


def simulate_run(
    run_dir: Path,
    *,
    at: Place = None,
    max_lags: Sequence[int] = (),
    queue: int | None = None,
    filter_range: tuple[float, float] | None = None,
    pacing: str = "paced",
) -> list[Prediction]:
    """One prediction for each bound; the run's own bound when none is given."""
    history = read_history(run_dir, at=at)
    return [
        predict(history, max_lag=max_lag, queue=queue, filter_range=filter_range, pacing=pacing)
        for max_lag in (max_lags or [history.config.max_lag])
    ]


def predict(
    history: History,
    *,
    max_lag: int,
    queue: int | None = None,
    filter_range: tuple[float, float] | None = None,
    pacing: str = "paced",
) -> Prediction:
    """Play the history under a bound. queue is the bound itself when absent, as in a run with default settings."""
    if pacing not in PACINGS:
        raise SettingError(f"pacing={pacing} is unknown; take {' or '.join(PACINGS)}")
    if max_lag < 0 or (queue is not None and queue < 0):
        raise SettingError(f"max_lag={max_lag}, queue={queue}: versions cannot be negative")
    filter_range = history.config.algo.reward.filter_range if filter_range is None else filter_range
    ahead = max_lag if queue is None else queue
    if pacing == "paced":
        outcome = play_paced(history, max_lag=max_lag, queue=ahead, filter_range=filter_range)
    else:
        outcome = play_recorded(history, max_lag=max_lag, filter_range=filter_range)
    return _prediction(history, outcome, max_lag=max_lag, queue=ahead, pacing=pacing)


def _prediction(history: History, outcome: Outcome, *, max_lag: int, queue: int, pacing: str) -> Prediction:
    _, tokens = count_fates(history, outcome)
    decided = sum(tokens.values()) - tokens["open"]
    kept = [group for group in history.groups if outcome.fate.get(group.group_id) == Decision.ADMITTED]
    lost = [group for group in history.groups if group.group_id in outcome.fate and outcome.fate[group.group_id] != Decision.ADMITTED]
    lengths = distribution_bias(_lengths(kept), _lengths(lost))
    rewards: Bias = mean_bias(_rewards(kept), _rewards(lost))
    return Prediction(
        max_lag=max_lag,
        queue=queue,
        pacing=pacing,
        num_groups=len(history.groups),
        num_steps=outcome.num_steps,
        n_kept=tokens["admitted"],
        n_stale=tokens["stale"],
        n_filtered=tokens["filtered"],
        n_incomplete=tokens["incomplete"],
        n_open=tokens["open"],
        kept_share=tokens["admitted"] / decided if decided else None,
        lag_mean=float(np.mean(outcome.lags)) if outcome.lags else None,
        lag_max=max(outcome.lags, default=None),
        wait_s=outcome.wait_s,
        wait_share=outcome.wait_s / outcome.elapsed_s if outcome.elapsed_s else None,
        elapsed_s=outcome.elapsed_s,
        length_kept=lengths.mean_kept,
        length_lost=lengths.mean_lost,
        length_p=lengths.p_value,
        reward_kept=rewards.mean_kept,
        reward_lost=rewards.mean_lost,
        reward_p=rewards.p_value,
    )


def _lengths(groups: Sequence[PastGroup]) -> list[float]:
    """Mean sampled tokens per rollout of each group: members of one group are not independent, so the group is the unit."""
    return [group.n_sampled / group.num_rollouts for group in groups if group.num_rollouts]


def _rewards(groups: Sequence[PastGroup]) -> list[float]:
    return [group.reward for group in groups if group.reward is not None]
